// Vocabulary of the choice: how a gradient travels, what decides it, and what the user asked for one tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>

#include "core/base/status.h"

namespace poseidon {

// A registered way for a gradient to travel (registry.h), by its place in the registry of this process. Places may
// differ between versions: between ranks the name travels.
class Scheme {
 public:
  constexpr Scheme() = default;  // kAllreduce
  constexpr explicit Scheme(size_t place) : place_(static_cast<uint8_t>(place)) {}

  constexpr size_t place() const { return place_; }
  friend constexpr bool operator==(Scheme a, Scheme b) { return a.place_ == b.place_; }
  friend constexpr bool operator!=(Scheme a, Scheme b) { return a.place_ != b.place_; }

  // For code that is about one of them. A new scheme needs none.
  static const Scheme kAllreduce;        // the gradient itself, summed by the transport
  static const Scheme kSfb;              // its sufficient factors x and d (sfb.cc)
  static const Scheme kSparseAllgather;  // values and indices of a sparse gradient
  static const Scheme kRowSparse;        // the touched rows of an embedding table (row_sparse.cc)

 private:
  uint8_t place_ = 0;
};

inline constexpr Scheme Scheme::kAllreduce{0};
inline constexpr Scheme Scheme::kSfb{1};
inline constexpr Scheme Scheme::kSparseAllgather{2};
inline constexpr Scheme Scheme::kRowSparse{3};

// What decides for tensors without an override.
enum class Policy : uint8_t {
  kBytes,      // the scheme that sends fewer bytes
  kAllreduce,  // always allreduce
  kSfb,        // SFB, or row-sparse for an embedding, wherever it is possible
  kTime,       // what makes the predicted step shortest
};

// What the user asked for one tensor: a scheme, or nothing.
class SchemeOverride {
 public:
  constexpr SchemeOverride() = default;  // kAuto
  constexpr SchemeOverride(Scheme scheme) : scheme_(scheme), given_(true) {}

  constexpr bool is_auto() const { return !given_; }
  constexpr Scheme scheme() const { return scheme_; }
  friend constexpr bool operator==(SchemeOverride a, SchemeOverride b) {
    return a.given_ == b.given_ && a.scheme_ == b.scheme_;
  }
  friend constexpr bool operator!=(SchemeOverride a, SchemeOverride b) { return !(a == b); }

  static const SchemeOverride kAuto, kAllreduce, kSfb, kRowSparse;

 private:
  Scheme scheme_;
  bool given_ = false;
};

inline constexpr SchemeOverride SchemeOverride::kAuto{};
inline constexpr SchemeOverride SchemeOverride::kAllreduce{Scheme::kAllreduce};
inline constexpr SchemeOverride SchemeOverride::kSfb{Scheme::kSfb};
inline constexpr SchemeOverride SchemeOverride::kRowSparse{Scheme::kRowSparse};

const char* Name(Scheme scheme);
const char* Name(Policy policy);
const char* Name(SchemeOverride value);
inline std::ostream& operator<<(std::ostream& out, Scheme scheme) { return out << Name(scheme); }
inline std::ostream& operator<<(std::ostream& out, SchemeOverride value) { return out << Name(value); }

// Accept exactly the spellings of Name(). On anything else *out is untouched and the kInvalidArgument message lists the
// good values; the caller adds which option held the bad one.
Status ParseScheme(const std::string& text, Scheme* out);
Status ParsePolicy(const std::string& text, Policy* out);
Status ParseSchemeOverride(const std::string& text, SchemeOverride* out);

}  // namespace poseidon
