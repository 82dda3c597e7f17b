#include "core/plan.h"

#include <set>

#include "tests/check.h"

namespace poseidon {
namespace {

Plan Example() {
  Plan plan;
  plan.size = 4;
  plan.reconstruct_threads = 2;
  plan.made_at_step = 3;
  plan.network = {{1e-3, 2e-9}, {5e-4, 1e-9}, 0.25, true};
  plan.prediction = {true, {1, 2, 3, 4}, {5, 6, 7, 8}, {1.25, 2.5}};
  plan.decisions.push_back({"fc.weight", Scheme::kSfb, 1.5e9, 0.1, -1, 1.5, 0.25, 256, "bytes", false});
  plan.decisions.push_back({"emb.weight", Scheme::kRowSparse, 3, -1, 2.5, -1, -1, 0, "sfb was asked for", true});
  plan.dense_method = DenseMethod::kPriority;
  plan.slices = {{{1, 0}}, {{1}, 2, 3}};
  return plan;
}

TEST(EncodingRoundTrip) {
  const std::vector<uint8_t> bytes = EncodePlan(Example());
  Plan back;
  POSEIDON_REQUIRE_OK(DecodePlan(bytes.data(), bytes.size(), &back));
  POSEIDON_CHECK_EQ(EncodePlan(back), bytes);
  POSEIDON_CHECK_EQ(back.size, 4);
  POSEIDON_CHECK_EQ(back.reconstruct_threads, 2);
  POSEIDON_REQUIRE(back.decisions.size() == 2);
  POSEIDON_CHECK_EQ(back.decisions[0].name, "fc.weight");
  POSEIDON_CHECK_EQ(back.decisions[0].scheme, Scheme::kSfb);
  POSEIDON_CHECK_EQ(back.decisions[0].sfb_bytes, 0.1);
  POSEIDON_CHECK_EQ(back.decisions[0].allreduce_bytes, 1.5e9);
  POSEIDON_CHECK_EQ(back.decisions[0].global_rows, 256);
  POSEIDON_CHECK_EQ(back.decisions[0].allreduce_seconds + back.decisions[0].gather_seconds, 1.75);
  POSEIDON_CHECK_EQ(back.made_at_step, 3);
  POSEIDON_CHECK_EQ(back.network.allgather.beta, 1e-9);
  POSEIDON_CHECK_EQ(back.network.skew_seconds, 0.25);
  POSEIDON_CHECK_EQ(back.prediction.dense.rebuild, 8.0);
  POSEIDON_CHECK_EQ(back.prediction.load.allreduce, 1.25);
  POSEIDON_CHECK_EQ(back.prediction.load.allgather, 2.5);
  POSEIDON_CHECK(back.dense_method == DenseMethod::kPriority && back.slices == Example().slices);
  POSEIDON_CHECK_EQ(back.decisions[1].scheme, Scheme::kRowSparse);
  POSEIDON_CHECK_EQ(back.decisions[1].row_sparse_bytes, 2.5);
  POSEIDON_CHECK_EQ(back.decisions[1].reason, "sfb was asked for");
  POSEIDON_CHECK(back.decisions[1].request_refused && !back.decisions[0].request_refused);
}

TEST(DamagedEncodingFails) {
  const std::vector<uint8_t> bytes = EncodePlan(Example());
  Plan back;
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    POSEIDON_CHECK_EQ(DecodePlan(cut.data(), cut.size(), &back).code(), StatusCode::kInvalidArgument);
  }
  std::vector<uint8_t> longer = bytes;
  longer.push_back(0);
  POSEIDON_CHECK_CONTAINS(DecodePlan(longer.data(), longer.size(), &back).message(), "same version");
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::vector<uint8_t> damaged = bytes;
    damaged[i] = 0xff;
    if (DecodePlan(damaged.data(), damaged.size(), &back).ok()) POSEIDON_CHECK_EQ(EncodePlan(back), damaged);
  }
}

TEST(Fnv1aVectors) {
  POSEIDON_CHECK_EQ(HashBytes("", 0), 0xcbf29ce484222325u);
  POSEIDON_CHECK_EQ(HashBytes("a", 1), 0xaf63dc4c8601ec8cu);
  POSEIDON_CHECK_EQ(HashBytes("foobar", 6), 0x85944171f73967e8u);
}

TEST(PlanHashSeesEveryPart) {
  const std::vector<uint8_t> bytes = EncodePlan(Example());
  const std::vector<LocalTensor> local = {{"a", {2, 3}}, {"b", {}}};
  const uint64_t hash = HashPlan(bytes, local);
  POSEIDON_CHECK_EQ(HashPlan(bytes, local), hash);
  Plan other = Example();
  other.decisions[0].scheme = Scheme::kAllreduce;
  const std::set<uint64_t> hashes = {
      hash,
      HashPlan(EncodePlan(other), local),
      HashPlan(bytes, {{"a", {3, 2}}, {"b", {}}}),
      HashPlan(bytes, {{"a", {2, 3}}, {"c", {}}}),
      HashPlan(bytes, {{"b", {}}, {"a", {2, 3}}}),
      HashPlan(bytes, {{"a", {2, 3}}}),
      HashPlan(bytes, {}),
      HashPlan({}, local),
  };
  POSEIDON_CHECK_EQ(hashes.size(), size_t{8});
}

}  // namespace
}  // namespace poseidon
