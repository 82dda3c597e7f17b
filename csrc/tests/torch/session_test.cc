// Sessions on threads, each on autograd's graphs of its own.
#include <string>
#include <vector>

#include "tests/torch/training.h"

namespace poseidon {
namespace {

// Two linear layers on rows that differ in number and values between ranks, steps and passes.
Training Mlp() {
  Training training;
  training.shapes = {{24, 12}, {24}, {8, 24}, {8}};
  training.loss = [](const Tensors& p, int rank, int step, int pass) {
    const at::Tensor x = Numbers({3 + rank + step % 2, 12}, 5 + 31 * rank + 7 * step + 3 * pass).to(p[0].scalar_type());
    return at::linear(at::linear(x, p[0], p[1]).tanh(), p[2], p[3]).pow(2).mean();
  };
  return training;
}

Training Words() {
  Training training;
  training.shapes = {{40, 6}, {4, 6}, {4}};
  training.loss = [](const Tensors& p, int rank, int step, int pass) {
    const at::Tensor ids = (Numbers({5, 3}, 11 + 29 * rank + step + 2 * pass).abs() * 40).to(at::kLong).clamp_max(39);
    return at::linear(at::embedding(p[0], ids).mean(1), p[1], p[2]).pow(2).mean();
  };
  return training;
}

Scheme SchemeOf(const Trained& trained, int index) { return trained.plan.decisions[index].scheme; }

void Dense(Training* training, const std::string& method) {
  training->options.policy = Policy::kAllreduce;
  POSEIDON_REQUIRE_OK(ParseDense(method, &training->options.dense));
}

void Factors(Training* training) {
  training->options.policy = Policy::kSfb;
  POSEIDON_REQUIRE_OK(ParseDense("lazy", &training->options.dense));
}

}  // namespace

TEST(LinearLayersAsFactors) {
  for (int ranks : {2, 3}) {
    Training training = Mlp();
    Factors(&training);
    training.ranks = ranks;
    const Trained trained = Check(training);
    for (int i = 0; i < 4; ++i) POSEIDON_CHECK_EQ(SchemeOf(trained, i), Scheme::kSfb);
  }
}

TEST(LinearLayersWholeByEachLayout) {
  for (const char* method : {"lazy:400", "wfbp", "bsp", "merged", "priority:256", "horovod"}) {
    Training training = Mlp();
    Dense(&training, method);
    training.options.network.allreduce = training.options.network.allgather = {1e-4, 1e-9};
    const Trained trained = Check(training);
    for (int i = 0; i < 4; ++i) POSEIDON_CHECK_EQ(SchemeOf(trained, i), Scheme::kAllreduce);
  }
}

TEST(TableAsRows) {
  Training training = Words();
  Factors(&training);
  const Trained trained = Check(training);
  POSEIDON_CHECK_EQ(SchemeOf(trained, 0), Scheme::kRowSparse);
}

TEST(SeveralPasses) {
  for (Training training : {Mlp(), Words()}) {
    Factors(&training);
    training.options.passes_per_step = 3;
    Check(training);
  }
  Training training = Mlp();
  Dense(&training, "bsp");
  training.options.passes_per_step = 2;
  Check(training);
}

// All ranks are here, and count themselves in each step before factors may travel.
TEST(UnevenStepsAllowed) {
  for (Training training : {Mlp(), Words()}) {
    Factors(&training);
    training.options.uneven_steps = true;
    Check(training);
  }
}

TEST(ReducedInStep) {
  Training training = Mlp();
  Factors(&training);
  training.options.reduce_in_backward = false;
  Check(training);
}

// Reset() leaves what other ranks have not sent yet in flight, with its buffers.
TEST(ResetInFlight) {
  for (const char* method : {"lazy:400", "priority:256"}) {
    for (Training training : {Mlp(), Words()}) {
      Factors(&training);
      POSEIDON_REQUIRE_OK(ParseDense(method, &training.options.dense));
      training.options.reduce_in_backward = false;
      training.options.network.allreduce = training.options.network.allgather = {1e-4, 1e-9};
      training.steps = 6;
      training.reset_at = {2, 4};
      Check(training);
    }
  }
}

TEST(HeadThatOneRankLeavesOut) {
  Training training = Mlp();
  Factors(&training);
  training.steps = 5;
  const auto loss = training.loss;
  training.loss = [loss](const Tensors& p, int rank, int step, int pass) {
    if (rank == 1 && step >= 2) return p[0].mul(0.1).sum();  // no call of linear
    return loss(p, rank, step, pass);
  };
  Check(training);
}

}  // namespace poseidon
