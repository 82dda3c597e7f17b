// The plan of rank 0, as every rank takes it.
#include <limits>

#include "core/base/bounds.h"
#include "core/plan/chooser.h"
#include "core/plan/plan.h"
#include "tests/fuzz/fuzz.h"

namespace poseidon {
namespace fuzz {
namespace {

Plan Small(DenseMethod method, std::vector<DenseSlice> slices) {
  Plan plan;
  plan.size = 2;
  plan.reconstruct_threads = 1;
  plan.made_at_step = 3;
  plan.network = {{1e-3, 2e-9}, {5e-4, 1e-9}, 0.25, true};
  plan.prediction = {true, {0.1, 0.05, 0.03, 0.01}, {0.2, 0.1, 0.1, 0}, {1.25, 2.5}};
  plan.decisions.push_back(
      {"fc.weight", Scheme::kSfb, {{Scheme::kAllreduce, 8e4, 0.1, ""}, {Scheme::kSfb, 1e4, 0.01, ""}}, 64, "bytes"});
  plan.decisions.push_back({"a", Scheme::kAllreduce, {{Scheme::kAllreduce, 400, 0.01, ""}}, 0, "not a linear weight"});
  plan.decisions.push_back({"b", Scheme::kAllreduce, {{Scheme::kAllreduce, 400, -1, ""}}, 0, "", true});
  plan.decisions.push_back({"table",
                            Scheme::kRowSparse,
                            {{Scheme::kAllreduce, 1e6, -1, "sparse"}, {Scheme::kRowSparse, 2e3, -1, ""}},
                            50,
                            "bytes"});
  plan.dense_method = method;
  plan.slices = std::move(slices);
  return plan;
}

std::vector<Bytes> Seeds() {
  return {EncodePlan(Plan{}), EncodePlan(Small(DenseMethod::kLazy, {{{2, 1}}})),
          EncodePlan(Small(DenseMethod::kFused, {})),
          EncodePlan(Small(DenseMethod::kPriority, {{{2}, 0, 3}, {{1}, 0, 1}, {{2}, 1, 3}, {{2}, 2, 3}}))};
}

// What every index of a plan that fits is used for.
void Use(const Plan& plan, const std::vector<LocalTensor>& local) {
  std::vector<double> sent(local.size());
  for (const DenseSlice& slice : plan.slices) {
    for (int index : slice.tensors) sent.at(index) += 1.0 / slice.parts;
  }
  Question question;
  for (size_t i = 0; i < local.size(); ++i) {
    question.profile.tensors.emplace_back();
    question.profile.tensors.back().base.name = local[i].name;
    question.profile.tensors.back().base.shape = local[i].shape;
    FUZZ_REQUIRE(sent[i] == 0 || IsWithin(sent[i], 0.9999, 1.0001));
  }
  question.profile.step_seconds = 1;
  question.measured.network = plan.network;
  ChooserSettings settings;
  settings.setting.size = plan.size;
  settings.policy = Policy::kTime;
  Trials trials;
  trials.Observe(plan.decisions, plan.slices, 1, 1);
  trials.load = plan.prediction.load;
  const Plan next = Choose(question, settings, &trials);
  FUZZ_REQUIRE(IsWithin(next.prediction.chosen.step, 0, std::numeric_limits<double>::max()));
}

bool Run(const Bytes& input) {
  Plan plan;
  const uint64_t before = AllocatedBytes();
  const bool read = DecodePlan(input.data(), input.size(), &plan).ok();
  FUZZ_REQUIRE(AllocatedBytes() - before <= MostAllocated(input.size()));
  if (!read) return false;
  FUZZ_REQUIRE(EncodePlan(plan) == input);
  std::vector<LocalTensor> local;
  for (const TensorDecision& decision : plan.decisions) local.push_back({decision.name, {10, 10}});
  if (CheckPlan(plan, plan.size, local).ok()) Use(plan, local);
  FUZZ_REQUIRE(HashPlan(input, local) == HashPlan(EncodePlan(plan), local));
  FUZZ_REQUIRE(!CheckPlan(plan, plan.size ^ 1, local).ok());
  local.push_back({"one more", {}});
  FUZZ_REQUIRE(!CheckPlan(plan, plan.size, local).ok());
  return true;
}

}  // namespace

const Target kPlanTarget = {
    "plan", "what decodes encodes to the same bytes, and of what fits the parameters every index is good", Seeds, Run};

}  // namespace fuzz
}  // namespace poseidon
