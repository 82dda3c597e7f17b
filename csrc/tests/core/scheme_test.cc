#include "core/schemes/scheme.h"

#include <utility>

#include "core/schemes/registry.h"
#include "tests/check.h"

namespace poseidon {
namespace {

template <typename T>
void CheckRoundTrip(std::vector<T> values, Status (*parse)(const std::string&, T*)) {
  for (T value : values) {
    T parsed = value == values[0] ? values[1] : values[0];
    POSEIDON_CHECK_OK(parse(Name(value), &parsed));
    POSEIDON_CHECK_EQ(parsed, value);
  }
}

TEST(NamesParseBack) {
  CheckRoundTrip<Scheme>({Scheme::kAllreduce, Scheme::kSfb, Scheme::kSparseAllgather, Scheme::kRowSparse}, ParseScheme);
  CheckRoundTrip<Policy>({Policy::kBytes, Policy::kAllreduce, Policy::kSfb}, ParsePolicy);
  CheckRoundTrip<SchemeOverride>(
      {SchemeOverride::kAuto, SchemeOverride::kAllreduce, SchemeOverride::kSfb, SchemeOverride::kRowSparse},
      ParseSchemeOverride);
}

TEST(ConstantsNameTheirRules) {
  POSEIDON_CHECK_EQ(SchemeCount(), size_t{4});
  const std::vector<std::pair<Scheme, std::string>> names = {{Scheme::kAllreduce, "allreduce"},
                                                             {Scheme::kSfb, "sfb"},
                                                             {Scheme::kSparseAllgather, "sparse_allgather"},
                                                             {Scheme::kRowSparse, "row-sparse"}};
  for (const auto& [scheme, name] : names) {
    POSEIDON_CHECK_EQ(std::string(Name(scheme)), name);
    POSEIDON_CHECK_EQ(RuleOf(scheme).plain(), scheme == Scheme::kAllreduce || scheme == Scheme::kSparseAllgather);
    POSEIDON_CHECK(!RuleOf(scheme).lossy());
  }
  POSEIDON_CHECK(Scheme() == Scheme::kAllreduce);
}

TEST(BadValueListsTheGoodOnes) {
  Policy policy = Policy::kSfb;
  for (const char* bad : {"", "Bytes", "bytes ", "0", "auto"}) {
    const Status status = ParsePolicy(bad, &policy);
    POSEIDON_CHECK_EQ(status.code(), StatusCode::kInvalidArgument);
    POSEIDON_CHECK_EQ(status.message(),
                      "unknown policy \"" + std::string(bad) + "\"; use one of: time, bytes, allreduce, sfb");
    POSEIDON_CHECK_EQ(policy, Policy::kSfb);
  }
  Scheme scheme = Scheme::kSfb;
  POSEIDON_CHECK_CONTAINS(ParseScheme("x", &scheme).message(), "allreduce, sfb, sparse_allgather, row-sparse");
  SchemeOverride value = SchemeOverride::kSfb;
  POSEIDON_CHECK_CONTAINS(ParseSchemeOverride("x", &value).message(), "auto, allreduce, sfb, row-sparse");
}

}  // namespace
}  // namespace poseidon
