#include "core/plan/plan.h"

#include <limits>
#include <set>
#include <utility>

#include "core/base/bounds.h"
#include "tests/check.h"
#include "tests/replace_double.h"

namespace poseidon {
namespace {

Plan Example() {
  Plan plan;
  plan.size = 4;
  plan.reconstruct_threads = 2;
  plan.made_at_step = 3;
  plan.network = {{1e-3, 2e-9}, {5e-4, 1e-9}, 0.25, true};
  plan.prediction = {true, {1, 2, 3, 4}, {5, 6, 7, 8}, {1.25, 2.5}};
  plan.decisions.push_back({"fc.weight",
                            Scheme::kSfb,
                            {{Scheme::kAllreduce, 1.5e9, 1.5, ""}, {Scheme::kSfb, 0.1, 0.25, ""}},
                            256,
                            "bytes",
                            false});
  plan.decisions.push_back({"emb.weight",
                            Scheme::kRowSparse,
                            {{Scheme::kAllreduce, 3, -1, "the gradient is sparse"}, {Scheme::kRowSparse, 2.5, -1, ""}},
                            0,
                            "sfb was asked for",
                            true});
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
  POSEIDON_CHECK_EQ(back.decisions[0].bytes(Scheme::kSfb), 0.1);
  POSEIDON_CHECK_EQ(back.decisions[0].bytes(Scheme::kAllreduce), 1.5e9);
  POSEIDON_CHECK_EQ(back.decisions[0].global_rows, 256);
  POSEIDON_CHECK_EQ(back.decisions[0].seconds(Scheme::kAllreduce) + back.decisions[0].seconds(Scheme::kSfb), 1.75);
  POSEIDON_CHECK_EQ(back.made_at_step, 3);
  POSEIDON_CHECK_EQ(back.network.allgather.beta, 1e-9);
  POSEIDON_CHECK_EQ(back.network.skew_seconds, 0.25);
  POSEIDON_CHECK_EQ(back.prediction.dense.rebuild, 8.0);
  POSEIDON_CHECK_EQ(back.prediction.load.allreduce, 1.25);
  POSEIDON_CHECK_EQ(back.prediction.load.allgather, 2.5);
  POSEIDON_CHECK(back.dense_method == DenseMethod::kPriority && back.slices == Example().slices);
  POSEIDON_CHECK_EQ(back.decisions[1].scheme, Scheme::kRowSparse);
  POSEIDON_CHECK_EQ(back.decisions[1].bytes(Scheme::kRowSparse), 2.5);
  POSEIDON_CHECK_EQ(back.decisions[1].OfferOf(Scheme::kAllreduce)->obstacle, "the gradient is sparse");
  POSEIDON_CHECK(back.decisions[0].OfferOf(Scheme::kRowSparse) == nullptr);
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

TEST(SchemesTravelByName) {
  const std::vector<uint8_t> bytes = EncodePlan(Example());
  const std::string text(bytes.begin(), bytes.end());
  for (const char* name : {"sfb", "allreduce", "row-sparse"}) POSEIDON_CHECK(text.find(name) != std::string::npos);
  std::vector<uint8_t> other = bytes;  // of a version that has another scheme
  const size_t at = text.find("row-sparse");
  other[at] = 'R';
  Plan back;
  POSEIDON_CHECK_CONTAINS(DecodePlan(other.data(), other.size(), &back).message(), "same version");
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

TEST(NumbersOutOfBoundsAreNotRead) {
  Plan back;
  const auto readable = [&](const Plan& plan) {
    const std::vector<uint8_t> bytes = EncodePlan(plan);
    return DecodePlan(bytes.data(), bytes.size(), &back).ok();
  };
  Plan plan = Example();
  plan.made_at_step = -1;
  POSEIDON_CHECK(!readable(plan));
  // What is measured or predicted is moved into bounds by whoever writes it.
  plan = Example();
  plan.network.allreduce = {1e300, std::numeric_limits<double>::quiet_NaN()};
  plan.prediction.chosen.step = std::numeric_limits<double>::infinity();
  plan.prediction.load = {0, 1e9};
  plan.decisions[0].offers[1].seconds = std::numeric_limits<double>::quiet_NaN();
  POSEIDON_REQUIRE(readable(plan));
  POSEIDON_CHECK(back.network.allreduce.alpha == kMostAlpha && back.network.allreduce.beta == 0);
  POSEIDON_CHECK_EQ(back.prediction.chosen.step, kMostSeconds);
  POSEIDON_CHECK(back.prediction.load.allreduce == kLeastLoad && back.prediction.load.allgather == kMostLoad);
  POSEIDON_CHECK_EQ(back.decisions[0].seconds(Scheme::kSfb), 0.0);
  // Whoever does not is not read.
  plan = Example();
  plan.decisions[0].Put({Scheme::kRowSparse, 11.5, -1, ""});
  plan.decisions[1].offers[1].seconds = 12.5;
  plan.decisions[1].offers[0].seconds = 13.5;
  for (double value :
       {1e-3, 2e-9, 5e-4, 1e-9, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1.25, 1.5e9, 0.1, 11.5, 1.5, 12.5, 13.5}) {
    for (double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), 1e308, -2.0}) {
      std::vector<uint8_t> bytes = EncodePlan(plan);
      POSEIDON_REQUIRE(ReplaceDouble(value, bad, &bytes));
      POSEIDON_CHECK_EQ(DecodePlan(bytes.data(), bytes.size(), &back).code(), StatusCode::kInvalidArgument);
    }
  }
}

Plan Sliced(DenseMethod method, std::vector<DenseSlice> slices) {
  Plan plan;
  plan.size = 2;
  plan.decisions.resize(3);
  for (size_t i = 0; i < 3; ++i) plan.decisions[i].name = "abc"[i];
  plan.decisions[2].scheme = Scheme::kSfb;
  plan.dense_method = method;
  plan.slices = std::move(slices);
  return plan;
}

TEST(APlanFitsTheParameters) {
  const std::vector<LocalTensor> local = {{"a", {2, 3}}, {"b", {}}, {"c", {4}}};
  const auto check = [&](DenseMethod method, std::vector<DenseSlice> slices) {
    return CheckPlan(Sliced(method, std::move(slices)), 2, local).message();
  };
  constexpr DenseMethod kLazy = DenseMethod::kLazy, kPriority = DenseMethod::kPriority;
  POSEIDON_CHECK_EQ(check(kLazy, {}), "");
  POSEIDON_CHECK_EQ(check(kLazy, {{{1, 0}}}), "");
  POSEIDON_CHECK_EQ(
      check(kPriority, {{{0}, 0, 6}, {{1}, 0, 1}, {{0}, 1, 6}, {{0}, 2, 6}, {{0}, 3, 6}, {{0}, 4, 6}, {{0}, 5, 6}}),
      "");
  POSEIDON_CHECK_CONTAINS(check(kLazy, {{{0}}, {{1, 0}}}), "a is sent twice");
  POSEIDON_CHECK_CONTAINS(check(kLazy, {{{0, 0}}}), "a is sent twice");
  POSEIDON_CHECK_CONTAINS(check(kLazy, {{{3}}}), "a slice of parameter 3");
  POSEIDON_CHECK_CONTAINS(check(kLazy, {{{-1}}}), "a slice of parameter -1");
  POSEIDON_CHECK_CONTAINS(check(kLazy, {{{}}}), "without gradients");
  POSEIDON_CHECK_CONTAINS(check(kLazy, {{{0}, 0, 2}, {{0}, 1, 2}}), "method lazy sends a gradient in parts");
  POSEIDON_CHECK_CONTAINS(check(kPriority, {{{0, 1}}}), "puts gradients together");
  POSEIDON_CHECK_CONTAINS(check(kLazy, {{{2}}}), "c is in a slice and travels by sfb");
  POSEIDON_CHECK_CONTAINS(check(kPriority, {{{1}, 0, 2}, {{1}, 1, 2}}), "b of shape [] in 2 parts");
  POSEIDON_CHECK_CONTAINS(check(kPriority, {{{0}, 0, 7}}), "a of shape [2, 3] in 7 parts");
  POSEIDON_CHECK_CONTAINS(check(kPriority, {{{0}, 0, 2}}), "of a 1 of 2 parts are sent");
  POSEIDON_CHECK_CONTAINS(check(kPriority, {{{0}, 1, 2}, {{0}, 0, 2}}), "out of order");
  POSEIDON_CHECK_CONTAINS(check(kPriority, {{{0}, 0, 2}, {{0}, 1, 3}}), "cut in two ways");
  POSEIDON_CHECK_CONTAINS(check(kPriority, {{{0}, 0, 0}}), "part 0 of 0");
  POSEIDON_CHECK_CONTAINS(check(kPriority, {{{0}, -1, 2}}), "part -1 of 2");

  const Plan plan = Sliced(kLazy, {});
  POSEIDON_CHECK_CONTAINS(CheckPlan(plan, 3, local).message(), "for 2 ranks, there are 3");
  POSEIDON_CHECK_CONTAINS(CheckPlan(plan, 2, {{"a", {}}}).message(), "on 3 parameters, there are 1");
  POSEIDON_CHECK_CONTAINS(CheckPlan(plan, 2, {}).message(), "on 3 parameters, there are 0");
  POSEIDON_CHECK_CONTAINS(CheckPlan(plan, 2, {{"a", {}}, {"x", {}}, {"c", {}}}).message(),
                          "parameter 1 is b there and x here");
  POSEIDON_CHECK_EQ(CheckPlan(plan, 3, local).code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace poseidon
