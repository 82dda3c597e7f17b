#include "core/schemes/registry.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace poseidon {

// A line per scheme: the function that makes its rule. Scheme's constants name the first ones by their place.
#define POSEIDON_SCHEMES(RULE)  \
  RULE(MakeAllreduceRule)       \
  RULE(MakeSfbRule)             \
  RULE(MakeSparseAllgatherRule) \
  RULE(MakeRowSparseRule)

#define POSEIDON_DECLARE(make) std::unique_ptr<const SchemeRule> make();
POSEIDON_SCHEMES(POSEIDON_DECLARE)
#undef POSEIDON_DECLARE

namespace {

using Rules = std::vector<std::unique_ptr<const SchemeRule>>;

Rules BuiltIn() {
  Rules rules;
#define POSEIDON_ADD(make) rules.push_back(make());
  POSEIDON_SCHEMES(POSEIDON_ADD)
#undef POSEIDON_ADD
  return rules;
}

// Never destroyed: threads may name schemes while the process ends.
Rules& Registered() {
  static Rules& rules = *new Rules(BuiltIn());
  return rules;
}

}  // namespace

size_t SchemeCount() { return Registered().size(); }

const SchemeRule& RuleOf(Scheme scheme) { return *Registered().at(scheme.place()); }

Scheme Register(std::unique_ptr<const SchemeRule> rule) {
  for (const auto& other : Registered()) {
    if (std::strcmp(other->name(), rule->name()) != 0) continue;
    std::fprintf(stderr, "poseidon: the scheme %s is registered twice\n", rule->name());
    std::abort();
  }
  Registered().push_back(std::move(rule));
  return Scheme(SchemeCount() - 1);
}

}  // namespace poseidon
