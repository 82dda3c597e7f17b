// A new scheme is one file (halves_scheme.h, lossy_scheme below) and one line: Register(). Nothing else of the core
// knows it.
#include <cstddef>

#include "core/engine/stats.h"
#include "core/plan/chooser.h"
#include "core/plan/plan.h"
#include "tests/check.h"
#include "tests/core/halves_scheme.h"

namespace poseidon {
namespace {

const Scheme kHalves = Register(MakeHalvesRule());

// A tenth of the bytes at the price of digits.
class Tenth final : public SchemeRule {
 public:
  const char* name() const override { return "tenth"; }
  bool lossy() const override { return true; }
  std::string Obstacle(const MergedTensor& tensor, const Setting&) const override {
    return tensor.sparse ? "the gradient is sparse" : "";
  }
  Work WorkOf(const MergedTensor& tensor, const LayerCost& cost, const Setting& setting) const override {
    Work work = RuleOf(Scheme::kAllreduce).WorkOf(tensor, cost, setting);
    work.bytes /= 10;
    return work;
  }
};

const Scheme kTenth = Register(std::make_unique<Tenth>());

MergedTensor Gradient(const std::string& name, int64_t elements, double ready) {
  MergedTensor tensor;
  tensor.base.name = name;
  tensor.base.shape = {elements};
  tensor.base.used = true;
  tensor.ready_seconds = ready;
  return tensor;
}

// An allreduce costs twice per byte what it does in a ring; so half of the bytes, gathered, pay where a gradient is
// large.
Question TwoGradients() {
  Question question;
  question.profile.tensors = {Gradient("large", 1 << 20, 0.01), Gradient("small", 10, 0.02)};
  question.profile.compute_seconds = 0.02;
  question.measured.network.allreduce = {1e-3, 1e-7};
  question.measured.network.allgather = {1e-3, 1e-8};
  return question;
}

ChooserSettings Settings(Policy policy, std::vector<SchemeOverride> wishes = {}) {
  ChooserSettings settings;
  settings.policy = policy;
  settings.setting.size = 4;
  settings.wishes = std::move(wishes);
  return settings;
}

TEST(ItIsChosenWhereItShortensTheStep) {
  Trials trials;
  const Plan plan = Choose(TwoGradients(), Settings(Policy::kTime), &trials);
  POSEIDON_CHECK_EQ(plan.decisions[0].scheme, kHalves);
  POSEIDON_CHECK_CONTAINS(plan.decisions[0].reason, "time: ");
  POSEIDON_CHECK_EQ(plan.decisions[1].scheme, Scheme::kAllreduce);
  POSEIDON_CHECK(plan.prediction.chosen.step < plan.prediction.dense.step);
  POSEIDON_CHECK_NEAR(plan.decisions[0].seconds(kHalves), 1e-3 + 1e-8 * (8 << 20) + 2e-3, 1e-12);
  // And keeps its place under what was observed; where that was bad, it leaves.
  Question question = TwoGradients();
  question.profile.step_seconds = 3;
  trials.Observe(plan.decisions, plan.slices, 3, 10);
  question.profile.first_step_seconds = 0.5;
  POSEIDON_CHECK_EQ(Choose(question, Settings(Policy::kTime), &trials).decisions[0].scheme, Scheme::kAllreduce);
}

TEST(ByBytesItIsComparedLikeTheOthers) {
  Trials trials;
  const Plan plan = Choose(TwoGradients(), Settings(Policy::kBytes), &trials);
  POSEIDON_CHECK_EQ(plan.decisions[0].scheme, kHalves);  // 4 ranks: half of the gradient from each, sent once
  POSEIDON_CHECK_EQ(plan.decisions[0].reason, "bytes: 6.29 MB sent against 6.29 MB");
  ChooserSettings eight = Settings(Policy::kBytes);
  eight.setting.size = 8;
  POSEIDON_CHECK_EQ(Choose(TwoGradients(), eight, &trials).decisions[0].scheme, Scheme::kAllreduce);
}

TEST(ItCanBeAskedForByName) {
  SchemeOverride wish;
  POSEIDON_REQUIRE_OK(ParseSchemeOverride("halves", &wish));
  POSEIDON_CHECK_EQ(wish, SchemeOverride(kHalves));
  Trials trials;
  Question question = TwoGradients();
  Plan plan = Choose(question, Settings(Policy::kAllreduce, {wish}), &trials);
  POSEIDON_CHECK_EQ(plan.decisions[0].scheme, kHalves);
  POSEIDON_CHECK_EQ(plan.decisions[0].reason, "override: halves");
  question.profile.tensors[0].base.shape = {3, 5};
  plan = Choose(question, Settings(Policy::kAllreduce, {wish}), &trials);
  POSEIDON_CHECK_EQ(plan.decisions[0].scheme, Scheme::kAllreduce);
  POSEIDON_CHECK(plan.decisions[0].request_refused);
  POSEIDON_CHECK_EQ(plan.decisions[0].reason,
                    "override: halves was asked for but cannot be: its elements cannot be halved");
}

TEST(WhatLosesDigitsIsNeverChosenUnasked) {
  Trials trials;
  Question question = TwoGradients();
  for (Policy policy : {Policy::kTime, Policy::kBytes, Policy::kSfb, Policy::kAllreduce}) {
    for (const TensorDecision& decision : Choose(question, Settings(policy), &trials).decisions) {
      POSEIDON_CHECK(decision.scheme != kTenth);
      POSEIDON_CHECK(decision.OfferOf(kTenth) != nullptr);
    }
  }
  POSEIDON_CHECK_EQ(Choose(question, Settings(Policy::kTime, {kTenth}), &trials).decisions[0].scheme, kTenth);
}

TEST(ItTravelsByName) {
  Trials trials;
  Plan plan = Choose(TwoGradients(), Settings(Policy::kTime), &trials);
  const std::vector<uint8_t> bytes = EncodePlan(plan);
  Plan back;
  POSEIDON_REQUIRE_OK(DecodePlan(bytes.data(), bytes.size(), &back));
  POSEIDON_CHECK_EQ(back.decisions[0].scheme, kHalves);
  POSEIDON_CHECK_EQ(back.decisions[0].bytes(kHalves), plan.decisions[0].bytes(kHalves));
  POSEIDON_CHECK(std::string(bytes.begin(), bytes.end()).find("halves") != std::string::npos);
}

TEST(ItIsCounted) {
  SessionStats stats;
  stats.of(kHalves).tensors += 2;
  POSEIDON_CHECK_EQ(stats.by_scheme.size(), SchemeCount());
  POSEIDON_CHECK_EQ(stats.by_scheme[kHalves.place()].tensors, 2);
}

}  // namespace
}  // namespace poseidon
