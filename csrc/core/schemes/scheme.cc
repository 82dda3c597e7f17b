#include "core/schemes/scheme.h"

#include <vector>

#include "core/base/named.h"
#include "core/schemes/registry.h"

namespace poseidon {

const char* Name(Scheme scheme) { return RuleOf(scheme).name(); }

const char* Name(Policy policy) {
  switch (policy) {
    case Policy::kBytes:
      return "bytes";
    case Policy::kAllreduce:
      return "allreduce";
    case Policy::kSfb:
      return "sfb";
    case Policy::kTime:
      return "time";
  }
  return "unknown";
}

const char* Name(SchemeOverride value) { return value.is_auto() ? "auto" : Name(value.scheme()); }

Status ParseScheme(const std::string& text, Scheme* out) {
  std::vector<Scheme> values;
  for (size_t place = 0; place < SchemeCount(); ++place) values.push_back(Scheme(place));
  return ParseNamed("scheme", text, values, out);
}

Status ParsePolicy(const std::string& text, Policy* out) {
  return ParseNamed<Policy>("policy", text, {Policy::kTime, Policy::kBytes, Policy::kAllreduce, Policy::kSfb}, out);
}

Status ParseSchemeOverride(const std::string& text, SchemeOverride* out) {
  std::vector<SchemeOverride> values = {SchemeOverride::kAuto};
  for (size_t place = 0; place < SchemeCount(); ++place) {
    if (RuleOf(Scheme(place)).can_be_asked_for()) values.push_back(Scheme(place));
  }
  return ParseNamed("scheme override", text, values, out);
}

}  // namespace poseidon
