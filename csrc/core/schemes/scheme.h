// Vocabulary of the choice: how a gradient travels, what decides it, and what the user asked for one tensor.
// Scheme's values travel between ranks (plan.h): append only.
#ifndef POSEIDON_CORE_SCHEME_H_
#define POSEIDON_CORE_SCHEME_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/base/status.h"

namespace poseidon {

enum class Scheme : uint8_t {
  kAllreduce,        // the gradient itself, summed by Horovod
  kSfb,              // its sufficient factors x and d, gathered; every rank rebuilds d^T x (Poseidon, section 3.2)
  kSparseAllgather,  // values and indices of a sparse gradient, as Horovod does it
  kRowSparse,        // the touched rows of an embedding table, merged by id and gathered; every rank scatters them
};

// For arrays indexed by Scheme.
constexpr size_t kSchemeCount = 4;

// What decides for tensors without an override.
enum class Policy : uint8_t {
  kBytes,      // the scheme that sends fewer bytes
  kAllreduce,  // always allreduce
  kSfb,        // SFB, or row-sparse for an embedding, wherever it is possible
  kTime,       // what makes the predicted step shortest
};

enum class SchemeOverride : uint8_t { kAuto, kAllreduce, kSfb, kRowSparse };

const char* Name(Scheme scheme);
const char* Name(Policy policy);
const char* Name(SchemeOverride value);

// Accept exactly the spellings of Name(). On anything else *out is untouched and the kInvalidArgument message lists the
// good values; the caller adds which option held the bad one.
Status ParseScheme(const std::string& text, Scheme* out);
Status ParsePolicy(const std::string& text, Policy* out);
Status ParseSchemeOverride(const std::string& text, SchemeOverride* out);

}  // namespace poseidon

#endif  // POSEIDON_CORE_SCHEME_H_
