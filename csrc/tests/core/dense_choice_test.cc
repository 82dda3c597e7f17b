#include "core/plan/dense_choice.h"

#include <algorithm>

#include "tests/check.h"

namespace poseidon {
namespace {

MergedTensor Gradient(const std::string& name, int64_t elements, int64_t order, double ready) {
  MergedTensor tensor;
  tensor.base.name = name;
  tensor.base.shape = {elements};
  tensor.base.used = true;
  tensor.base.order = order;
  tensor.ready_seconds = ready;
  return tensor;
}

struct Case {
  MergedProfile profile;
  std::vector<TensorDecision> decisions;
  std::vector<bool> may_share;
  SelectorSettings settings;
  TimeInputs inputs;

  // Forty small gradients, then a large one, in the order of backward; the parameters' order is the other way round.
  Case() {
    settings.size = 4;
    settings.policy = Policy::kAllreduce;
    for (int64_t i = 40; i >= 0; --i) {
      profile.tensors.push_back(
          Gradient("p" + std::to_string(i), i == 40 ? 4 << 20 : 1000, i, 0.0001 * static_cast<double>(i)));
    }
    profile.compute_seconds = 0.05;
    may_share.assign(profile.tensors.size(), true);
    decisions = Select(profile, {}, settings);
    inputs.network.allreduce = {1e-3, 1e-8};
    inputs.network.allgather = {1e-3, 1e-8};
  }

  std::vector<DenseSlice> LayOut(const std::string& method, bool timed = true) const {
    DenseSettings dense;
    POSEIDON_REQUIRE_OK(ParseDense(method, &dense));
    return ChooseLayout(profile, decisions, may_share, settings, dense, timed ? &inputs : nullptr);
  }
};

TEST(OrderIsThatOfBackward) {
  const auto slices = Case().LayOut("lazy:100000");
  POSEIDON_REQUIRE(slices.size() == 3);
  POSEIDON_CHECK_EQ(slices[0].tensors.front(), 40);  // "p0", the last parameter
  POSEIDON_CHECK_EQ(slices[0].tensors.size(), size_t{25});
  POSEIDON_CHECK_EQ(slices[1].tensors, std::vector<int>{0});  // large: alone
}

TEST(AutoMergesWhatIsSmallWhereMessagesAreDear) {
  Case given;
  const size_t dear = given.LayOut("auto").size();
  given.inputs.network.allreduce.alpha = 1e-7;
  const size_t cheap = given.LayOut("auto").size();
  POSEIDON_CHECK(dear < 12 && cheap > 30);
}

// The large gradient is sooner sent than copied, the others of a quarter of its size sooner copied than sent: no single
// theta says so.
TEST(AutoPoolsSmallOnesAndLeavesALargeOneInPlace) {
  Case given;
  for (size_t i = 1; i < given.profile.tensors.size(); ++i) given.profile.tensors[i].base.shape = {1 << 20};
  given.inputs.network.allreduce = {0.1, 1e-11};
  given.inputs.copy = 1e-8;
  bool alone = false;
  size_t most = 0;
  for (const DenseSlice& slice : given.LayOut("auto")) {
    alone = alone || slice.tensors == std::vector<int>{0};
    most = std::max(most, slice.tensors.size());
  }
  POSEIDON_CHECK(alone);
  POSEIDON_CHECK(most > 4);
}

// Under a load of 4 the first message would take 160 ms and all others could wait for its end; as it was measured it
// takes 40.
TEST(AutoDoesNotCountOnALoadedNetwork) {
  Case given;
  for (MergedTensor& tensor : given.profile.tensors) {
    tensor.base.shape = {1 << 20};
    tensor.ready_seconds = 0.004 * static_cast<double>(tensor.base.order);
  }
  given.profile.compute_seconds = 0.17;
  given.decisions = Select(given.profile, {}, given.settings);
  given.inputs.network.allreduce = {1e-4, 1e-8};
  given.inputs.load.allreduce = 4;
  const auto slices = given.LayOut("auto");
  POSEIDON_REQUIRE(slices.size() > 1);
  double complete = 0;
  for (int index : slices[1].tensors) complete = std::max(complete, given.profile.tensors[index].ready_seconds);
  POSEIDON_CHECK(complete < 0.06);
}

// Copying everything takes 20 ms and forty messages more 16 ms, but fifteen times that where other threads find no core
// free.
TEST(AutoCountsOnDearMessagesWhereCoresAreBusy) {
  Case given;
  for (MergedTensor& tensor : given.profile.tensors) tensor.base.shape = {100000};
  given.decisions = Select(given.profile, {}, given.settings);
  given.inputs.network.allreduce = {4e-4, 1e-9};
  given.inputs.copy = 1.2e-9;
  const auto spare = given.LayOut("auto");
  given.inputs.contention = 1;
  POSEIDON_CHECK(given.LayOut("auto").size() < spare.size());
  given.inputs.network_given = true;
  POSEIDON_CHECK(given.LayOut("auto") == spare);
}

TEST(AutoKeepsTheLayoutInForceUnlessAnotherGains) {
  Case given;
  given.inputs.settings.margin = 0.02;
  const auto best = given.LayOut("auto");
  given.inputs.slices = best;
  given.inputs.network.allreduce.alpha *= 1.01;
  POSEIDON_CHECK(given.LayOut("auto") == best);
  given.inputs.slices = given.LayOut("wfbp");
  POSEIDON_CHECK(given.LayOut("auto") != given.inputs.slices);
}

TEST(OnlyWhatIsAllreducedAndMayShare) {
  Case given;
  given.may_share[3] = false;
  given.profile.tensors[4].base.order = -1;  // unused in the profiled step
  given.decisions[5].scheme = Scheme::kSfb;
  given.profile.tensors[5].base.bias = given.decisions[6].name;
  for (const DenseSlice& slice : given.LayOut("bsp")) {
    for (int index : slice.tensors) POSEIDON_CHECK(index < 3 || index > 6);
  }
  given.settings.size = 1;
  POSEIDON_CHECK(given.LayOut("bsp").empty());
}

TEST(WithoutMeasurementsAutoIsLazy) {
  const Case given;
  POSEIDON_CHECK(given.LayOut("auto", /*timed=*/false) == given.LayOut("lazy"));
  POSEIDON_CHECK(given.LayOut("horovod").empty());
}

TEST(PredictionIsThatOfTheLayout) {
  const Case given;
  StepPrediction prediction;
  DenseSettings dense;
  dense.method = DenseMethod::kWfbp;
  const auto decisions = Select(given.profile, {}, given.settings, &given.inputs, &prediction);
  prediction.chosen.step += 0.5;  // unexplained
  ChooseLayout(given.profile, decisions, given.may_share, given.settings, dense, &given.inputs, &prediction);
  // 41 messages of 1 ms, and their bytes.
  POSEIDON_CHECK_NEAR(prediction.chosen.channel, 41 * 1e-3 + 1e-8 * 4 * (40 * 1000 + (4 << 20)), 1e-9);
  POSEIDON_CHECK_NEAR(prediction.chosen.step, prediction.simulated_step + 0.5, 1e-12);
}

}  // namespace
}  // namespace poseidon
