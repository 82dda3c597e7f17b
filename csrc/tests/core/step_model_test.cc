#include "core/model/step_model.h"

#include <cmath>
#include <limits>

#include "core/plan/network_load.h"
#include "tests/check.h"
#include "tests/core/two_offers.h"

namespace poseidon {
namespace {

constexpr int kA = 0, kS = 1;

StepTensor Tensor(double ready, double allreduce_bytes, double gather_bytes = 0, LayerCost cost = {}) {
  return TwoOffers(ready, allreduce_bytes, gather_bytes, cost);
}

StepModel Model(std::vector<StepTensor> tensors, double compute) {
  StepModel model;
  model.allreduce = {1, 0.01};
  model.allgather = {0.5, 0.01};
  model.compute = compute;
  model.fusion_bytes = 128 << 20;
  model.tensors = std::move(tensors);
  return model;
}

TEST(OneMessageAfterBackward) {
  const StepEstimate estimate = SimulateStep(Model({Tensor(10, 300)}, 10), {kA});
  POSEIDON_CHECK_NEAR(estimate.step, 10 + 1 + 3, 1e-12);
  POSEIDON_CHECK_NEAR(estimate.exposed(), 4, 1e-12);
  POSEIDON_CHECK_NEAR(estimate.channel, 4, 1e-12);
}

// tau_c(l) = max(end of the message before, gradient complete): the second waits for the channel, the third for its
// gradient.
TEST(WaitFreeBackpropagation) {
  const StepEstimate estimate =
      SimulateStep(Model({Tensor(1, 300), Tensor(2, 200), Tensor(20, 100)}, 20), {kA, kA, kA});
  POSEIDON_CHECK_NEAR(estimate.channel, 4 + 3 + 2, 1e-12);
  POSEIDON_CHECK_NEAR(estimate.step, 22, 1e-12);
}

TEST(WhatIsReadyTogetherIsFused) {
  StepModel model = Model({Tensor(1, 300), Tensor(2, 100), Tensor(3, 100)}, 3);
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kA, kA, kA}).step, 1 + 4 + 3, 1e-12);  // the last two as one
  model.fusion_bytes = 150;
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kA, kA, kA}).step, 1 + 4 + 2 + 2, 1e-12);
  model.fusion_bytes = 1e9;
  model.tensors[2].offers[0].kind = 1;  // another dtype
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kA, kA, kA}).step, 1 + 4 + 2 + 2, 1e-12);
}

TEST(FactorsLeaveEarlierAndAreRebuilt) {
  // Complete at 10, of which 2 its own product and 1 its input gradient.
  const StepModel model = Model({Tensor(10, 1000, 100, {2, 1, 0.25, 4})}, 10);
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kA}).step, 10 + 11, 1e-12);
  const StepEstimate estimate = SimulateStep(model, {kS});
  POSEIDON_CHECK_NEAR(estimate.compute, 10 - 2 + 0.25, 1e-12);
  POSEIDON_CHECK_NEAR(estimate.step, 10 - 2 - 1 + 0.25 + 1.5 + 4, 1e-12);
  POSEIDON_CHECK_NEAR(estimate.rebuild, 4, 1e-12);
}

TEST(SavedProductsBringLaterGradientsForward) {
  const StepModel model = Model({Tensor(10, 0, 0, {2, 0, 0, 0}), Tensor(30, 100)}, 30);
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kS, kA}).step, 28 + 2, 1e-12);
}

TEST(RebuildsWaitForTheirThread) {
  const StepModel model = Model({Tensor(0, 0, 100, {0, 0, 0, 5}), Tensor(0, 0, 100, {0, 0, 0, 5})}, 1);
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kS, kS}).step, 0.5 + 2 + 10, 1e-12);
}

TEST(SharedCoresDelayBackwardToo) {
  StepModel model = Model({Tensor(0, 0, 50, {0, 0, 0, 4}), Tensor(20, 100)}, 20);
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kS, kA}).step, 20 + 2, 1e-12);
  model.contention = 1;
  const StepEstimate estimate = SimulateStep(model, {kS, kA});
  POSEIDON_CHECK_NEAR(estimate.compute, 24, 1e-12);
  POSEIDON_CHECK_NEAR(estimate.step, 24 + 2, 1e-12);
}

TEST(ABiasTravelsWithItsWeight) {
  StepModel model = Model({Tensor(5, 1000, 100), Tensor(5, 4)}, 5);
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kS, kA}).channel, 1.5 + 1.04, 1e-12);
  model.tensors[0].offers[1].covers = {1};
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kS, kA}).channel, 1.5, 1e-12);
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kA, kA}).channel, 11.04, 1e-12);
}

// A third scheme: an allreduce of a quarter of the bytes, for which time is spent before and after.
TEST(AnyOfferIsCountedByItsWork) {
  StepModel model = Model({Tensor(5, 1000, 100), Tensor(5, 4)}, 5);
  Work quarter;
  quarter.bytes = 250;
  quarter.kind = 9;
  quarter.before = 0.5;
  quarter.after = 0.75;
  model.tensors[0].offers.push_back(quarter);
  const StepEstimate estimate = SimulateStep(model, {2, kA});
  POSEIDON_CHECK_NEAR(estimate.compute, 5.5, 1e-12);
  POSEIDON_CHECK_NEAR(estimate.channel, 1 + 2.5 + 1.04, 1e-12);
  POSEIDON_CHECK_NEAR(estimate.step, 5.5 + 3.5 + 1.04, 1e-12);
  POSEIDON_CHECK_NEAR(estimate.rebuild, 0.75, 1e-12);
  POSEIDON_CHECK_NEAR(SecondsAlone(model, quarter), 3.5 + 1.25, 1e-12);
}

TEST(WhatIsNoIndexCountsAsTheFirstOffer) {
  StepModel model = Model({Tensor(5, 1000, 100)}, 5);
  for (int odd : {-1, 2, 1 << 30}) POSEIDON_CHECK_EQ(SimulateStep(model, {odd}).step, SimulateStep(model, {kA}).step);
  POSEIDON_CHECK_EQ(SimulateStep(model, {}).step, SimulateStep(model, {kA}).step);
  model.tensors[0].offers[1].covers = {0, -3, 77};
  POSEIDON_CHECK_EQ(SimulateStep(model, {kA}).step, 16.0);
  model.tensors[0].offers.clear();
  POSEIDON_CHECK_EQ(SimulateStep(model, {kS}).step, 6.0);
}

TEST(LoadIsWhatExplainsTheObservedStep) {
  const StepModel model = Model({Tensor(1, 300), Tensor(2, 200), Tensor(3, 100)}, 3);
  const Choice choice = {kA, kA, kA};
  for (double load : {0.6, 1.0, 2.5}) {
    const double observed = SimulateStep(UnderLoad(model, {load, 1}), choice).step;
    POSEIDON_CHECK_NEAR(LoadOf(model, choice, observed, {}).allreduce, load, 1e-6);
  }
  POSEIDON_CHECK_NEAR(LoadOf(model, choice, 1000, {}).allreduce, 4, 1e-6);
  POSEIDON_CHECK_NEAR(LoadOf(model, choice, 0.1, {}).allreduce, 0.5, 1e-6);
  // All hidden: a step that takes longer says nothing of the network.
  POSEIDON_CHECK_EQ(LoadOf(Model({Tensor(1, 100)}, 1000), {kA}, 1200, {1.5, 1}).allreduce, 1.5);
}

TEST(EachKindOfCollectiveHasItsOwnLoad) {
  const StepModel model = Model({Tensor(1, 300, 200), Tensor(2, 200, 200)}, 3);
  const double observed = SimulateStep(UnderLoad(model, {1, 2}), {kS, kS}).step;
  NetworkLoad load = LoadOf(model, {kS, kS}, observed, {1.25, 1});
  POSEIDON_CHECK_NEAR(load.allgather, 2, 1e-6);
  POSEIDON_CHECK_EQ(load.allreduce, 1.25);  // no allreduce ran
  load = LoadOf(model, {kA, kA}, SimulateStep(UnderLoad(model, {3, 1}), {kA, kA}).step, load);
  POSEIDON_CHECK_NEAR(load.allreduce, 3, 1e-6);
  POSEIDON_CHECK_NEAR(load.allgather, 2, 1e-6);
  load = LoadOf(model, {kA, kS}, SimulateStep(UnderLoad(model, {1.5, 1.5}), {kA, kS}).step, load);
  POSEIDON_CHECK_NEAR(load.allreduce, 1.5, 1e-6);
  POSEIDON_CHECK_NEAR(load.allgather, 1.5, 1e-6);
}

TEST(SlicesGoWhenTheirLastGradientIsComplete) {
  StepModel model = Model({Tensor(1, 100), Tensor(2, 100), Tensor(3, 100)}, 3);
  model.sliced = true;  // every gradient alone: 1 + 1 each
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kA, kA, kA}).step, 1 + 3 * 2, 1e-12);
  model.tensors[0].slice = model.tensors[2].slice = 5;
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kA, kA, kA}).step, 4 + 3, 1e-12);
  model.tensors[2].copied = true;
  model.copy = 0.005;
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kA, kA, kA}).step, 4 + 3, 1e-12);
  POSEIDON_CHECK_NEAR(SimulateStep(model, {kA, kA, kA}).compute, 3.5, 1e-12);
}

TEST(WithoutAGradientATensorIsSentAtTheEnd) {
  POSEIDON_CHECK_NEAR(SimulateStep(Model({Tensor(-1, 100)}, 7), {kA}).step, 7 + 2, 1e-12);
  POSEIDON_CHECK_NEAR(SimulateStep(Model({}, 7), {}).step, 7, 1e-12);
}

// A NaN or an infinity of another rank must not end or hang the one that makes the plan.
TEST(AnyNumberIsTakenForOneWithinBounds) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (double odd : {std::nan(""), kInfinity, -kInfinity, 1e308, -1e308, -1.0, 5e-324}) {
    for (size_t field = 0; field < 16; ++field) {
      StepModel model = Model({Tensor(1, 100, 50, {1, 1, 1, 1}), Tensor(2, 200, 50), Tensor(3, 10, 5)}, 4);
      StepTensor& tensor = model.tensors[1];
      double* const fields[] = {
          &model.allreduce.alpha, &model.allreduce.beta,   &model.allgather.alpha,   &model.allgather.beta,
          &model.compute,         &model.contention,       &model.fusion_bytes,      &model.copy,
          &tensor.ready,          &tensor.offers[0].bytes, &tensor.offers[1].bytes,  &tensor.local,
          &tensor.offers[0].own,  &tensor.offers[1].lead,  &tensor.offers[1].before, &tensor.offers[1].after};
      *fields[field] = odd;
      model.sliced = field % 2 == 0;
      tensor.copied = true;
      for (const Choice& choice : {Choice{kA, kA, kA}, {kS, kS, kA}, {kA, kS, kS}}) {
        const StepEstimate estimate = SimulateStep(model, choice);
        for (double value : {estimate.step, estimate.compute, estimate.channel, estimate.rebuild}) {
          POSEIDON_CHECK(std::isfinite(value) && value >= 0);
        }
        POSEIDON_CHECK(estimate.step >= estimate.compute);
        const NetworkLoad load = LoadOf(model, choice, odd, {odd, 1});
        POSEIDON_CHECK(!(load.allgather < kLeastLoad) && !(load.allgather > kMostLoad));
        POSEIDON_CHECK(std::isfinite(SimulateStep(UnderLoad(model, {odd, odd}), choice).step));
      }
    }
  }
}

}  // namespace
}  // namespace poseidon
