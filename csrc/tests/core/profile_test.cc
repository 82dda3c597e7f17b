#include "core/plan/profile.h"

#include <cmath>
#include <limits>

#include "tests/check.h"
#include "tests/replace_double.h"

namespace poseidon {
namespace {

TensorProfile Linear(const std::string& name, int64_t rows) {
  TensorProfile tensor;
  tensor.name = name;
  tensor.shape = {10, 20};
  tensor.bias = "fc.bias";
  tensor.is_linear_weight = tensor.used = tensor.sfb_allowed = true;
  tensor.rows = rows;
  tensor.calls = 1;
  return tensor;
}

RankProfile Rank(std::vector<TensorProfile> tensors) {
  return {7, "policy=bytes\ncompression=none", 1.5, 2.5, 3.5, std::move(tensors)};
}

MergedTensor MergeOne(const std::vector<TensorProfile>& by_rank) {
  std::vector<RankProfile> ranks;
  for (const TensorProfile& tensor : by_rank) ranks.push_back(Rank({tensor}));
  MergedProfile merged;
  POSEIDON_REQUIRE_OK(MergeProfiles(ranks, &merged));
  POSEIDON_REQUIRE(merged.tensors.size() == 1);
  return merged.tensors[0];
}

std::string Disagreement(const RankProfile& a, const RankProfile& b) {
  MergedProfile merged;
  const Status status = MergeProfiles({a, a, b}, &merged);
  POSEIDON_CHECK_EQ(status.code(), StatusCode::kInvalidArgument);
  return status.message();
}

RankProfile Rich() {
  RankProfile profile = Rank({Linear("fc.weight", 32), Linear("", 0), Linear("emb", 1)});
  profile.settings_hash = 0xfedcba9876543210;
  TensorProfile& odd = profile.tensors[1];
  odd.shape = {};
  odd.dtype = DType::kOther;
  odd.factor_dtype = DType::kBFloat16;
  odd.is_linear_weight = odd.used = odd.sfb_allowed = false;
  odd.bias.clear();
  odd.reason = "hook on the weight";
  profile.tensors[2].sparse = true;
  profile.tensors[2].calls = 5;
  profile.tensors[2].is_embedding = true;
  profile.tensors[2].unique_rows = 3;
  profile.tensors[2].order = 1;
  return profile;
}

TEST(EncodingRoundTrip) {
  const std::vector<uint8_t> bytes = EncodeProfile(Rich());
  RankProfile back;
  POSEIDON_REQUIRE_OK(DecodeProfile(bytes.data(), bytes.size(), &back));
  POSEIDON_CHECK_EQ(EncodeProfile(back), bytes);
  POSEIDON_CHECK_EQ(back.settings_hash, 0xfedcba9876543210);
  POSEIDON_CHECK_EQ(back.settings_text, "policy=bytes\ncompression=none");
  POSEIDON_REQUIRE(back.tensors.size() == 3);
  const TensorProfile& fc = back.tensors[0];
  POSEIDON_CHECK_EQ(fc.name, "fc.weight");
  POSEIDON_CHECK_EQ(fc.shape, std::vector<int64_t>{10, 20});
  POSEIDON_CHECK(fc.is_linear_weight && fc.bias == "fc.bias" && fc.used && fc.sfb_allowed && !fc.sparse);
  POSEIDON_CHECK_EQ(fc.rows, 32);
  const TensorProfile& odd = back.tensors[1];
  POSEIDON_CHECK_EQ(odd.dtype, DType::kOther);
  POSEIDON_CHECK_EQ(odd.factor_dtype, DType::kBFloat16);
  POSEIDON_CHECK(!odd.is_linear_weight && odd.bias.empty() && !odd.used && !odd.sfb_allowed);
  POSEIDON_CHECK_EQ(odd.reason, "hook on the weight");
  POSEIDON_CHECK(back.tensors[2].sparse);
  POSEIDON_CHECK_EQ(back.tensors[2].calls, 5);
  POSEIDON_CHECK(back.tensors[2].is_embedding && !fc.is_embedding);
  POSEIDON_CHECK_EQ(back.tensors[2].unique_rows, 3);
}

TEST(DamagedEncodingFails) {
  const std::vector<uint8_t> bytes = EncodeProfile(Rich());
  RankProfile back;
  for (size_t size = 0; size < bytes.size(); ++size) {
    // A copy of exactly this size, so that a sanitizer sees a read past the end.
    const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    POSEIDON_CHECK_EQ(DecodeProfile(cut.data(), cut.size(), &back).code(), StatusCode::kInvalidArgument);
  }
  std::vector<uint8_t> longer = bytes;
  longer.push_back(0);
  POSEIDON_CHECK_CONTAINS(DecodeProfile(longer.data(), longer.size(), &back).message(), "same version");
  // Any byte set to 255 either decodes to another profile or fails; it never reads out of bounds.
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::vector<uint8_t> damaged = bytes;
    damaged[i] = 0xff;
    if (DecodeProfile(damaged.data(), damaged.size(), &back).ok()) POSEIDON_CHECK_EQ(EncodeProfile(back), damaged);
  }
}

TEST(NegativeCountsFail) {
  for (int64_t bad : {int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
    RankProfile profile = Rank({Linear("w", bad)});
    const std::vector<uint8_t> bytes = EncodeProfile(profile);
    POSEIDON_CHECK(!DecodeProfile(bytes.data(), bytes.size(), &profile).ok());
  }
}

TEST(MergeSumsRows) {
  const MergedTensor merged = MergeOne({Linear("w", 32), Linear("w", 0), Linear("w", 40)});
  POSEIDON_CHECK_EQ(merged.rows_by_rank, std::vector<int64_t>{32, 0, 40});
  POSEIDON_CHECK_EQ(merged.global_rows, 72);
  POSEIDON_CHECK_EQ(merged.max_rank_rows, 40);
  POSEIDON_CHECK(merged.sfb_allowed);
  POSEIDON_CHECK_EQ(merged.reason, "");
}

TEST(FirstObjectionWins) {
  TensorProfile one = Linear("w", 1), two = Linear("w", 1);
  one.sfb_allowed = two.sfb_allowed = false;
  one.reason = "hook on the weight";
  two.reason = "create_graph";
  const MergedTensor merged = MergeOne({Linear("w", 1), one, two});
  POSEIDON_CHECK(!merged.sfb_allowed);
  POSEIDON_CHECK_EQ(merged.reason, "rank 1: hook on the weight");
}

TEST(UnusedRankHasNoSay) {
  TensorProfile unused = Linear("w", 0);
  unused.used = unused.sfb_allowed = unused.is_linear_weight = false;
  unused.bias.clear();
  unused.factor_dtype = DType::kOther;
  unused.reason = "never called";
  const MergedTensor merged = MergeOne({unused, Linear("w", 8), unused});
  POSEIDON_CHECK(merged.sfb_allowed);
  POSEIDON_CHECK(merged.base.is_linear_weight && !merged.base.bias.empty());  // of the rank that used it
  POSEIDON_CHECK_EQ(merged.base.factor_dtype, DType::kFloat32);
  const MergedTensor nobody = MergeOne({unused, unused});
  POSEIDON_CHECK(!nobody.sfb_allowed);
  POSEIDON_CHECK_EQ(nobody.reason, "not used in the profiling step");
}

TEST(RanksThatUseItDifferently) {
  TensorProfile half = Linear("w", 8), no_bias = Linear("w", 8), conv = Linear("w", 8), sparse = Linear("w", 8);
  half.factor_dtype = DType::kFloat16;
  no_bias.bias.clear();
  conv.is_linear_weight = false;
  sparse.sparse = true;
  POSEIDON_CHECK_EQ(MergeOne({Linear("w", 8), half}).reason,
                    "rank 1: factors are float16 here and float32 on a lower rank");
  POSEIDON_CHECK_EQ(MergeOne({Linear("w", 8), no_bias}).reason,
                    "rank 1: used with no bias here, with bias fc.bias on a lower rank");
  POSEIDON_CHECK_EQ(MergeOne({no_bias, Linear("w", 8)}).reason,
                    "rank 1: used with bias fc.bias here, with no bias on a lower rank");
  const MergedTensor mixed = MergeOne({conv, Linear("w", 8)});
  POSEIDON_CHECK_EQ(mixed.reason, "rank 0: not used as the weight of a linear call");
  POSEIDON_CHECK(mixed.base.is_linear_weight);
  POSEIDON_CHECK(MergeOne({Linear("w", 8), sparse}).sparse);
}

TEST(EmbeddingTables) {
  TensorProfile table = Linear("w", 20);
  table.bias.clear();
  table.is_linear_weight = false;
  table.is_embedding = true;
  table.unique_rows = 5;
  TensorProfile unused = table;
  unused.used = unused.sfb_allowed = unused.is_embedding = false;
  unused.rows = unused.unique_rows = 0;
  const MergedTensor merged = MergeOne({unused, table, table});
  POSEIDON_CHECK(merged.sfb_allowed && merged.base.is_embedding && !merged.base.is_linear_weight);
  POSEIDON_CHECK_EQ(merged.global_rows, 40);
  POSEIDON_CHECK_EQ(merged.global_unique_rows, 10);
  // Tied with a linear layer, on all ranks or on some.
  TensorProfile linear = table, both = table, sparse = table;
  linear.is_embedding = false;
  linear.is_linear_weight = both.is_linear_weight = true;
  sparse.sparse = true;
  POSEIDON_CHECK_EQ(MergeOne({table, linear}).reason, "rank 1: not used as an embedding table alone");
  POSEIDON_CHECK_EQ(MergeOne({table, both}).reason, "rank 1: not used as an embedding table alone");
  POSEIDON_CHECK_EQ(MergeOne({linear, table}).reason, "rank 1: not used as the weight of a linear call");
  POSEIDON_CHECK(MergeOne({table, linear}).base.is_linear_weight);
  POSEIDON_CHECK_EQ(MergeOne({table, sparse}).reason, "rank 1: its gradient is sparse on some ranks only");
}

TEST(DisagreementNamesBothRanksAndValues) {
  const RankProfile base = Rank({Linear("a", 1), Linear("b", 1)});
  RankProfile other = base;
  other.tensors[1].name = "c";
  POSEIDON_CHECK_EQ(Disagreement(base, other),
                    "ranks disagree on parameter 1: rank 0 has b [10, 20] float32, rank 2 has c [10, 20] float32; "
                    "build the same model and pass its parameters in the same order on every rank");
  other = base;
  other.tensors[0].shape = {10, 21};
  POSEIDON_CHECK_CONTAINS(Disagreement(base, other),
                          "parameter 0: rank 0 has a [10, 20] float32, rank 2 has a [10, 21] float32");
  other = base;
  other.tensors[0].dtype = DType::kFloat64;
  POSEIDON_CHECK_CONTAINS(Disagreement(base, other), "rank 2 has a [10, 20] float64");
  other = base;
  other.tensors.pop_back();
  POSEIDON_CHECK_CONTAINS(Disagreement(base, other), "parameter 1: rank 0 has b [10, 20] float32, rank 2 has none");
  POSEIDON_CHECK_CONTAINS(Disagreement(other, base), "parameter 1: rank 0 has none, rank 2 has b");
  other = base;
  other.tensors[1].active = false;
  POSEIDON_CHECK_CONTAINS(Disagreement(base, other),
                          "parameter b: rank 0 has one that wants a gradient, rank 2 has one that wants none");
}

TEST(SparseHereAndDenseThere) {
  RankProfile dense = Rank({Linear("a", 1), Linear("b", 1)});
  RankProfile sparse = dense;
  sparse.tensors[1].sparse = true;
  POSEIDON_CHECK_OK(CompareLayouts({dense, dense}));
  POSEIDON_CHECK_OK(CompareLayouts({sparse, sparse}));
  const Status status = CompareLayouts({dense, dense, sparse});
  POSEIDON_CHECK_EQ(status.code(), StatusCode::kInvalidArgument);
  POSEIDON_CHECK_CONTAINS(status.message(), "gradient of b: rank 0 has a dense one, rank 2 has a sparse one");
  sparse.tensors[1].used = false;  // has no gradient of it, so it will send what the others do
  POSEIDON_CHECK_OK(CompareLayouts({dense, sparse}));
}

TEST(CompleteEverywhere) {
  TensorProfile complete = Linear("w", 1), late = Linear("w", 1);
  complete.complete = true;
  POSEIDON_CHECK(MergeOne({complete, complete}).everywhere);
  POSEIDON_CHECK(!MergeOne({complete, late}).everywhere);
}

TEST(SettingsDisagreementShowsTheLine) {
  const RankProfile base = Rank({});
  RankProfile other = base;
  other.settings_text = "policy=bytes\ncompression=fp16";
  other.settings_hash = 8;
  POSEIDON_CHECK_CONTAINS(
      Disagreement(base, other),
      "settings: rank 0 has \"compression=none\", rank 2 has \"compression=fp16\"; give every rank");
  other.settings_text = "policy=sfb\ncompression=none";
  POSEIDON_CHECK_CONTAINS(Disagreement(base, other), "rank 0 has \"policy=bytes\", rank 2 has \"policy=sfb\"");
  other.settings_text = base.settings_text + "\nextra=1";
  POSEIDON_CHECK_CONTAINS(Disagreement(base, other), "rank 0 has \"nothing\", rank 2 has \"extra=1\"");
  other.settings_text = base.settings_text;
  POSEIDON_CHECK_CONTAINS(Disagreement(base, other), "rank 0 has \"hash 7\", rank 2 has \"hash 8\"");
}

TEST(ShapeHelpers) {
  POSEIDON_CHECK_EQ(NumElements({}), 1);
  POSEIDON_CHECK_EQ(NumElements({4096, 25088}), 102760448);
  POSEIDON_CHECK_EQ(NumElements({int64_t{1} << 40, int64_t{1} << 40, 0}), 0);
  POSEIDON_CHECK_EQ(NumElements({int64_t{1} << 40, int64_t{1} << 40}), std::numeric_limits<int64_t>::max());
  POSEIDON_CHECK_EQ(ShapeText({}), "[]");
  POSEIDON_CHECK_EQ(ShapeText({3, 4}), "[3, 4]");
}

TEST(NothingToMerge) {
  MergedProfile merged;
  POSEIDON_CHECK_EQ(MergeProfiles({}, &merged).code(), StatusCode::kInternal);
  POSEIDON_CHECK_OK(MergeProfiles({Rank({})}, &merged));
  POSEIDON_CHECK_EQ(merged.tensors.size(), size_t{0});
}

TEST(NumbersOutOfBoundsFail) {
  RankProfile back;
  const auto readable = [&](const RankProfile& profile) {
    const std::vector<uint8_t> bytes = EncodeProfile(profile);
    return DecodeProfile(bytes.data(), bytes.size(), &back).ok();
  };
  RankProfile profile = Rank({Linear("w", 1)});
  profile.tensors[0].shape = {int64_t{1} << 40, int64_t{1} << 40};  // no such tensor: its elements would overflow
  POSEIDON_CHECK(!readable(profile));
  profile.tensors[0].shape = {int64_t{1} << 40, 0};
  POSEIDON_CHECK(readable(profile));
  // What this rank's clock says is moved into bounds: the others must be able to read it.
  profile.compute_seconds = std::numeric_limits<double>::quiet_NaN();
  profile.step_seconds = std::numeric_limits<double>::infinity();
  profile.tensors[0].ready_seconds = -0.5;
  POSEIDON_REQUIRE(readable(profile));
  POSEIDON_CHECK(back.compute_seconds == 0 && back.step_seconds == 1e9 && back.tensors[0].ready_seconds == -1);
  // Another program's would not.
  profile = Rank({Linear("w", 1)});
  profile.tensors[0].ready_seconds = 4.5;
  for (double value : {1.5, 2.5, 3.5, 4.5}) {
    for (double bad : {std::nan(""), std::numeric_limits<double>::infinity(), 1e308, -2.0}) {
      std::vector<uint8_t> bytes = EncodeProfile(profile);
      POSEIDON_REQUIRE(ReplaceDouble(value, bad, &bytes));
      POSEIDON_CHECK_EQ(DecodeProfile(bytes.data(), bytes.size(), &back).code(), StatusCode::kInvalidArgument);
    }
  }
}

}  // namespace
}  // namespace poseidon
