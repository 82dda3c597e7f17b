#include "core/schemes/scheme.h"

#include "core/base/named.h"

namespace poseidon {

const char* Name(Scheme scheme) {
  switch (scheme) {
    case Scheme::kAllreduce:
      return "allreduce";
    case Scheme::kSfb:
      return "sfb";
    case Scheme::kSparseAllgather:
      return "sparse_allgather";
    case Scheme::kRowSparse:
      return "row-sparse";
  }
  return "unknown";
}

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

const char* Name(SchemeOverride value) {
  switch (value) {
    case SchemeOverride::kAuto:
      return "auto";
    case SchemeOverride::kAllreduce:
      return "allreduce";
    case SchemeOverride::kSfb:
      return "sfb";
    case SchemeOverride::kRowSparse:
      return "row-sparse";
  }
  return "unknown";
}

Status ParseScheme(const std::string& text, Scheme* out) {
  return ParseNamed("scheme", text, {Scheme::kAllreduce, Scheme::kSfb, Scheme::kSparseAllgather, Scheme::kRowSparse},
                    out);
}

Status ParsePolicy(const std::string& text, Policy* out) {
  return ParseNamed("policy", text, {Policy::kTime, Policy::kBytes, Policy::kAllreduce, Policy::kSfb}, out);
}

Status ParseSchemeOverride(const std::string& text, SchemeOverride* out) {
  return ParseNamed(
      "scheme override", text,
      {SchemeOverride::kAuto, SchemeOverride::kAllreduce, SchemeOverride::kSfb, SchemeOverride::kRowSparse}, out);
}

}  // namespace poseidon
