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
  Question question;
  MergedProfile& profile = question.profile;
  std::vector<bool>& may_share = question.may_share;
  Measured& inputs = question.measured;
  std::vector<DenseSlice> slices;  // in force
  NetworkLoad load;
  ChooserSettings settings;

  // Forty small gradients, then a large one, in the order of backward; the parameters' order is the other way round.
  Case() {
    settings.setting.size = 4;
    settings.policy = Policy::kAllreduce;
    for (int64_t i = 40; i >= 0; --i) {
      profile.tensors.push_back(
          Gradient("p" + std::to_string(i), i == 40 ? 4 << 20 : 1000, i, 0.0001 * static_cast<double>(i)));
    }
    profile.compute_seconds = 0.05;
    may_share.assign(profile.tensors.size(), true);
    inputs.network.allreduce = {1e-3, 1e-8};
    inputs.network.allgather = {1e-3, 1e-8};
  }

  std::vector<DenseSlice> LayOut(const std::string& method, bool timed = true) {
    POSEIDON_REQUIRE_OK(ParseDense(method, &settings.dense));
    Question asked = question;
    if (!timed) asked.measured.network = {};
    Trials trials;
    trials.Observe({}, slices, 0, 0);
    trials.load = load;
    return Choose(asked, settings, &trials).slices;
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
  given.inputs.network.allreduce = {1e-4, 1e-8};
  given.load.allreduce = 4;
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
  const auto best = given.LayOut("auto");
  given.slices = best;
  given.inputs.network.allreduce.alpha *= 1.01;
  POSEIDON_CHECK(given.LayOut("auto") == best);
  given.slices = given.LayOut("wfbp");
  POSEIDON_CHECK(given.LayOut("auto") != given.slices);
}

TEST(OnlyWhatIsAllreducedAndMayShare) {
  Case given;
  given.may_share[3] = false;
  given.profile.tensors[4].base.order = -1;  // unused in the profiled step
  MergedTensor& weight = given.profile.tensors[5];
  weight.base.shape = {100, 100};
  weight.base.is_linear_weight = weight.sfb_allowed = true;
  weight.base.bias = given.profile.tensors[6].base.name;
  given.settings.wishes.resize(5);
  given.settings.wishes.push_back(SchemeOverride::kSfb);
  const auto slices = given.LayOut("bsp");
  POSEIDON_CHECK(!slices.empty());
  for (const DenseSlice& slice : slices) {
    for (int index : slice.tensors) POSEIDON_CHECK(index < 3 || index > 6);
  }
  given.settings.setting.size = 1;
  POSEIDON_CHECK(given.LayOut("bsp").empty());
}

TEST(WithoutMeasurementsAutoIsLazy) {
  Case given;
  POSEIDON_CHECK(given.LayOut("auto", /*timed=*/false) == given.LayOut("lazy"));
  POSEIDON_CHECK(given.LayOut("horovod").empty());
}

TEST(PredictionIsThatOfTheLayout) {
  Case given;
  given.settings.dense.method = DenseMethod::kWfbp;
  given.settings.policy = Policy::kTime;
  Trials trials;
  const StepPrediction prediction = Choose(given.question, given.settings, &trials).prediction;
  // 41 messages of 1 ms, and their bytes.
  POSEIDON_CHECK(prediction.known);
  POSEIDON_CHECK_NEAR(prediction.chosen.channel, 41 * 1e-3 + 1e-8 * 4 * (40 * 1000 + (4 << 20)), 1e-9);
  POSEIDON_CHECK_NEAR(prediction.chosen.step, 0.001 + prediction.chosen.channel, 0.01);
}

}  // namespace
}  // namespace poseidon
