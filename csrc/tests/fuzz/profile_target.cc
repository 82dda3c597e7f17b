// A rank's profile, and all that rank 0 makes of it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/base/bounds.h"
#include "core/model/cost_model.h"
#include "core/plan/dense_choice.h"
#include "core/plan/plan.h"
#include "core/plan/profile.h"
#include "core/plan/selector.h"
#include "tests/fuzz/fuzz.h"

namespace poseidon {
namespace fuzz {
namespace {

constexpr size_t kMostTensors = 24;  // beyond, the search takes long and finds nothing else

TensorProfile Matrix(const std::string& name, int64_t out, int64_t in, int64_t rows, int64_t order) {
  TensorProfile tensor;
  tensor.name = name;
  tensor.shape = {out, in};
  tensor.used = true;
  tensor.rows = rows;
  tensor.calls = 1;
  tensor.sfb_allowed = true;
  tensor.order = order;
  tensor.ready_seconds = 0.01 * static_cast<double>(order);
  return tensor;
}

std::vector<Bytes> Seeds() {
  RankProfile profile{11, "policy=time\nop=average", 0.05, 0.1, 0.2, {}};
  TensorProfile fc = Matrix("fc.weight", 100, 200, 32, 2);
  fc.is_linear_weight = true;
  fc.bias = "fc.bias";
  TensorProfile bias;
  bias.name = "fc.bias";
  bias.shape = {100};
  bias.used = true;
  bias.order = 1;
  bias.reason = "it is no matrix";
  TensorProfile table = Matrix("table", 5000, 16, 64, 3);
  table.is_embedding = true;
  table.unique_rows = 40;
  profile.tensors = {fc, bias, table};
  std::vector<Bytes> seeds = {EncodeProfile(RankProfile{}), EncodeProfile(profile)};
  profile.tensors[0].dtype = profile.tensors[0].factor_dtype = DType::kBFloat16;
  profile.tensors[2].sparse = true;
  profile.tensors.push_back(bias);
  profile.tensors.back().name = "conv";
  profile.tensors.back().shape = {8, 3, 3, 3};
  profile.tensors.back().ready_seconds = -1;
  profile.tensors.back().order = -1;
  seeds.push_back(EncodeProfile(profile));
  return seeds;
}

void CheckBounds(const RankProfile& profile) {
  for (double seconds : {profile.compute_seconds, profile.step_seconds, profile.first_step_seconds}) {
    FUZZ_REQUIRE(IsWithin(seconds, 0, kMostSeconds));
  }
  for (const TensorProfile& tensor : profile.tensors) {
    FUZZ_REQUIRE(tensor.ready_seconds == -1 || IsWithin(tensor.ready_seconds, 0, kMostSeconds));
    FUZZ_REQUIRE(tensor.rows >= 0 && tensor.calls >= 0 && tensor.unique_rows >= 0 && tensor.order >= -1);
    FUZZ_REQUIRE(NumElements(tensor.shape) >= 0 && NumElements(tensor.shape) <= kMostCount);
  }
}

// Finite or not: given to pure functions that take any number.
double OddNumber(Choices* choices) {
  constexpr double kNumbers[] = {0,
                                 1e-9,
                                 1e-3,
                                 1,
                                 10,
                                 1e4,
                                 1e9,
                                 1e300,
                                 1e308,
                                 -1,
                                 std::numeric_limits<double>::infinity(),
                                 std::numeric_limits<double>::quiet_NaN()};
  return kNumbers[choices->Below(std::size(kNumbers))];
}

TimeInputs SomeInputs(Choices* choices, size_t tensors) {
  TimeInputs inputs;
  inputs.network = {{OddNumber(choices), OddNumber(choices)}, {OddNumber(choices), OddNumber(choices)}, 0, false};
  inputs.network_given = choices->Flag();
  inputs.contention = OddNumber(choices);
  inputs.copy = OddNumber(choices);
  inputs.costs.resize(choices->Below(tensors + 1));
  for (LayerCost& cost : inputs.costs) {
    cost = {OddNumber(choices), OddNumber(choices), OddNumber(choices), OddNumber(choices)};
  }
  if (choices->Flag()) inputs.settings.gather_memory_bytes = OddNumber(choices);
  return inputs;
}

bool MayShare(const MergedTensor& merged) {
  return !merged.sparse && IsFloating(merged.base.dtype) && NumElements(merged.base.shape) > 0;
}

// What Session does with a merged profile; the plan must reach every rank.
void Plan_(const MergedProfile& merged, const SelectorSettings& settings, const DenseSettings& dense, Choices* choices,
           TimeInputs* inputs) {
  std::vector<SchemeOverride> overrides;
  for (size_t i = choices->Below(merged.tensors.size() + 1); i > 0; --i) {
    overrides.push_back(static_cast<SchemeOverride>(choices->Below(4)));
  }
  std::vector<bool> may_share;
  for (const MergedTensor& tensor : merged.tensors) may_share.push_back(MayShare(tensor));
  Plan plan;
  plan.size = settings.size;
  if (inputs != nullptr) plan.network = inputs->network;
  plan.decisions = Select(merged, overrides, settings, inputs, &plan.prediction);
  plan.dense_method = dense.method;
  plan.slices = ChooseLayout(merged, plan.decisions, may_share, settings, dense, inputs, &plan.prediction);
  const Bytes bytes = EncodePlan(plan);
  Plan read;
  FUZZ_REQUIRE(DecodePlan(bytes.data(), bytes.size(), &read).ok());
  FUZZ_REQUIRE(EncodePlan(read) == bytes);
  std::vector<LocalTensor> local;
  for (const MergedTensor& tensor : merged.tensors) local.push_back({tensor.base.name, tensor.base.shape});
  const Status fits = CheckPlan(read, settings.size, local);
  if (!fits.ok()) std::fprintf(stderr, "%s\n", fits.message().c_str());
  FUZZ_REQUIRE(fits.ok());
  if (inputs == nullptr) return;
  inputs->current.clear();
  for (const TensorDecision& decision : read.decisions) inputs->current.push_back(decision.scheme);
  inputs->tried = {{inputs->current, merged.step_seconds, merged.step_seconds, 3}};
  inputs->slices = read.slices;
  inputs->load = read.prediction.load;
}

bool Run(const Bytes& input) {
  RankProfile profile;
  const uint64_t before = AllocatedBytes();
  const bool read = DecodeProfile(input.data(), input.size(), &profile).ok();
  FUZZ_REQUIRE(AllocatedBytes() - before <= MostAllocated(input.size()));
  if (!read) return false;
  FUZZ_REQUIRE(EncodeProfile(profile) == input);
  CheckBounds(profile);

  const Bytes seed = Seeds()[1];
  RankProfile other;
  FUZZ_REQUIRE(DecodeProfile(seed.data(), seed.size(), &other).ok());
  MergedProfile merged;
  if (const Status status = MergeProfiles({other, profile}, &merged); !status.ok())
    FUZZ_REQUIRE(!status.message().empty());
  if (profile.tensors.size() > kMostTensors) return true;
  Bytes made;  // choices that a mutation of the input changes altogether
  for (uint64_t word = HashBytes(input.data(), input.size()); made.size() < 256;
       word = word * 6364136223846793005u + 1) {
    made.push_back(static_cast<uint8_t>(word >> 56));
  }
  Choices choices(made);
  std::vector<RankProfile> ranks(1 + choices.Below(4), profile);
  for (RankProfile& rank : ranks) {
    for (TensorProfile& tensor : rank.tensors) {
      tensor.rows = choices.Flag() ? tensor.rows : static_cast<int64_t>(choices.Below(100));
    }
  }
  FUZZ_REQUIRE(MergeProfiles(ranks, &merged).ok() && merged.tensors.size() == profile.tensors.size());
  SelectorSettings settings;
  settings.size = static_cast<int>(ranks.size());
  settings.policy = static_cast<Policy>(choices.Below(4));
  settings.fp16_wire = choices.Flag();
  DenseSettings dense;
  dense.method = static_cast<DenseMethod>(choices.Below(static_cast<size_t>(DenseMethod::kAuto) + 1));
  dense.theta = int64_t{1} << choices.Below(40);
  TimeInputs inputs = SomeInputs(&choices, merged.tensors.size());
  const bool by_time = choices.Flag();
  for (int revision = 0; revision < 2; ++revision) {
    Plan_(merged, settings, dense, &choices, by_time ? &inputs : nullptr);
  }
  return true;
}

}  // namespace

const Target kProfileTarget = {
    "profile", "what decodes encodes to the same bytes, is within bounds, and every plan made of it reaches the ranks",
    Seeds, Run};

}  // namespace fuzz
}  // namespace poseidon
