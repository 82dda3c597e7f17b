// A new scheme is one file and one line in the core (tests/core/halves_scheme.h), and one file and one line here.
// Planning, steps and session carry it without knowing it.
#include <mutex>
#include <set>
#include <string>

#include "tests/check.h"
#include "tests/torch/halves_route.h"
#include "tests/torch/training.h"

namespace poseidon {
namespace {

const bool kRegistered = (RegisterRoute("halves", MakeHalvesRoute), true);

// Asked for by name, as a user would, for the first weight and not for its bias. The second layer goes by policy sfb.
Training WithHalves() {
  Training training;
  training.shapes = {{24, 12}, {24}, {8, 24}, {8}};
  training.loss = [](const Tensors& p, int rank, int step, int pass) {
    const at::Tensor x = Numbers({3 + rank, 12}, 5 + 31 * rank + 7 * step + 3 * pass).to(p[0].scalar_type());
    return at::linear(at::linear(x, p[0], p[1]).tanh(), p[2], p[3]).pow(2).mean();
  };
  training.options.policy = Policy::kSfb;
  POSEIDON_REQUIRE_OK(ParseDense("lazy", &training.options.dense));
  training.options.overrides = {SchemeOverride::kAuto, SchemeOverride::kAllreduce};
  POSEIDON_REQUIRE_OK(ParseSchemeOverride("halves", &training.options.overrides[0]));
  return training;
}

// In all steps but the first, whose plan is not made yet.
void CheckHalves(const Trained& trained, const Training& training) {
  POSEIDON_CHECK_EQ(std::string(Name(trained.plan.decisions[0].scheme)), std::string("halves"));
  POSEIDON_CHECK_EQ(trained.plan.decisions[0].reason, std::string("override: halves"));
  const SchemeStats& stats = trained.stats.of(kHalves);
  POSEIDON_CHECK_EQ(stats.tensors, training.steps - 1);
  POSEIDON_CHECK_EQ(stats.collectives, 2 * (training.steps - 1));
}

}  // namespace

TEST(BesideOtherSchemes) {
  const Training training = WithHalves();
  const Trained trained = Check(training);
  CheckHalves(trained, training);
  POSEIDON_CHECK_EQ(trained.plan.decisions[1].scheme, Scheme::kAllreduce);
  POSEIDON_CHECK_EQ(trained.plan.decisions[2].scheme, Scheme::kSfb);
  POSEIDON_CHECK_EQ(trained.plan.decisions[3].scheme, Scheme::kSfb);
  POSEIDON_CHECK(trained.warnings.empty());
}

TEST(SeveralPasses) {
  Training training = WithHalves();
  training.options.passes_per_step = 3;
  CheckHalves(Check(training), training);
}

// Its messages are converted, and the last one to come back restores the whole.
TEST(CompressedHalves) {
  Training training = WithHalves();
  training.options.compression = CompressionKind::kFp16;
  training.tolerance = 2e-3;
  CheckHalves(Check(training), training);
}

TEST(ReducedInStep) {
  Training training = WithHalves();
  training.options.reduce_in_backward = false;
  CheckHalves(Check(training), training);
}

// Reset() while halves are on their way: the next attempt sends them anew.
TEST(ResetInFlight) {
  Training training = WithHalves();
  training.options.reduce_in_backward = false;
  training.steps = 6;
  training.reset_at = {2, 4};
  const Trained trained = Check(training);
  POSEIDON_CHECK_EQ(trained.plan.decisions[0].scheme, kHalves);
}

TEST(LeftOutByOneRank) {
  Training training = WithHalves();
  training.steps = 5;
  const auto loss = training.loss;
  training.loss = [loss](const Tensors& p, int rank, int step, int pass) {
    if (rank == 1 && step >= 2) return p[3].mul(0.1).sum();
    return loss(p, rank, step, pass);
  };
  CheckHalves(Check(training), training);
}

// Once the plan is made, its calls take PyTorch's own path: nobody looks at its rows any more.
TEST(CallsAreNotProfiledForEver) {
  Training training = WithHalves();
  std::mutex mutex;
  std::set<std::string> profiled, planned;
  const auto loss = training.loss;
  training.loss = [&](const Tensors& p, int rank, int step, int pass) {
    if (p[0].scalar_type() == at::kFloat) {
      const at::Tensor y = at::linear(at::ones({1, 12}), p[0], p[1]);
      const std::lock_guard<std::mutex> lock(mutex);
      (step == 0 ? profiled : planned).insert(y.grad_fn()->name());
    }
    return loss(p, rank, step, pass);
  };
  Check(training);
  POSEIDON_CHECK_EQ(planned.size(), 1u);
  POSEIDON_CHECK_EQ(profiled.size(), 1u);
  POSEIDON_CHECK(planned != profiled);
}

TEST(RefusedWhereItCannotBe) {
  Training training = WithHalves();
  training.ranks = 3;
  const Trained trained = Check(training);
  POSEIDON_CHECK(trained.plan.decisions[0].request_refused);
  POSEIDON_CHECK_EQ(trained.plan.decisions[0].scheme, Scheme::kAllreduce);
  POSEIDON_CHECK_EQ(trained.warnings.size(), 1u);
  POSEIDON_CHECK(trained.warnings.front().find("the ranks cannot be halved") != std::string::npos);
  POSEIDON_CHECK_EQ(trained.stats.of(kHalves).tensors, 0);
}

}  // namespace poseidon
