// A rank's profile, and all that rank 0 makes of it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/base/bounds.h"
#include "core/model/cost_model.h"
#include "core/plan/chooser.h"
#include "core/plan/plan.h"
#include "core/plan/profile.h"
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

Measured SomeMeasured(Choices* choices, size_t tensors) {
  Measured measured;
  measured.network = {{OddNumber(choices), OddNumber(choices)}, {OddNumber(choices), OddNumber(choices)}, 0, false};
  measured.network_given = choices->Flag();
  measured.contention = OddNumber(choices);
  measured.copy = OddNumber(choices);
  measured.costs.resize(choices->Below(tensors + 1));
  for (LayerCost& cost : measured.costs) {
    cost = {OddNumber(choices), OddNumber(choices), OddNumber(choices), OddNumber(choices)};
  }
  return measured;
}

bool MayShare(const MergedTensor& merged) {
  return !merged.sparse && IsFloating(merged.base.dtype) && NumElements(merged.base.shape) > 0;
}

// What the agreement does with a merged profile; the plan must reach every rank.
void Plan_(const Question& question, ChooserSettings settings, Choices* choices, Trials* trials) {
  const std::vector<MergedTensor>& tensors = question.profile.tensors;
  constexpr SchemeOverride kWishes[] = {SchemeOverride::kAuto, SchemeOverride::kAllreduce, SchemeOverride::kSfb,
                                        SchemeOverride::kRowSparse};
  for (size_t i = choices->Below(tensors.size() + 1); i > 0; --i) settings.wishes.push_back(kWishes[choices->Below(4)]);
  const Plan plan = Choose(question, settings, trials);
  const Bytes bytes = EncodePlan(plan);
  Plan read;
  FUZZ_REQUIRE(DecodePlan(bytes.data(), bytes.size(), &read).ok());
  FUZZ_REQUIRE(EncodePlan(read) == bytes);
  std::vector<LocalTensor> local;
  for (const MergedTensor& tensor : tensors) local.push_back({tensor.base.name, tensor.base.shape});
  const Status fits = CheckPlan(read, settings.setting.size, local);
  if (!fits.ok()) std::fprintf(stderr, "%s\n", fits.message().c_str());
  FUZZ_REQUIRE(fits.ok());
  trials->Observe(read.decisions, read.slices, question.profile.step_seconds, 3);
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
  ChooserSettings settings;
  settings.setting.size = static_cast<int>(ranks.size());
  settings.policy = static_cast<Policy>(choices.Below(4));
  if (choices.Flag()) settings.setting.wire.codec = &HalfCodec();
  settings.dense.method = static_cast<DenseMethod>(choices.Below(static_cast<size_t>(DenseMethod::kAuto) + 1));
  settings.dense.theta = int64_t{1} << choices.Below(40);
  if (choices.Flag()) settings.gather_memory_bytes = OddNumber(&choices);
  Question question;
  question.profile = merged;
  if (choices.Flag()) question.measured = SomeMeasured(&choices, merged.tensors.size());
  for (const MergedTensor& tensor : merged.tensors) question.may_share.push_back(MayShare(tensor));
  Trials trials;
  for (int revision = 0; revision < 2; ++revision) Plan_(question, settings, &choices, &trials);
  return true;
}

}  // namespace

const Target kProfileTarget = {
    "profile", "what decodes encodes to the same bytes, is within bounds, and every plan made of it reaches the ranks",
    Seeds, Run};

}  // namespace fuzz
}  // namespace poseidon
