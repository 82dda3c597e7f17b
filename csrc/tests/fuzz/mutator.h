// Inputs from inputs: what the classic fuzzers do to bytes, and numbers that break arithmetic. The same seed gives the
// same inputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/fuzz/fuzz.h"

namespace poseidon {
namespace fuzz {

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : state_(seed) {}

  // Less than `count`, which is at least 1.
  size_t Below(size_t count) { return static_cast<size_t>(Next() % count); }
  // 1 to 8 changes of `input`, which may bring in parts of `other`; at most `most` bytes.
  Bytes Mutate(const Bytes& input, const Bytes& other, size_t most);

 private:
  uint64_t Next();
  void Change(const Bytes& other, Bytes* bytes);

  uint64_t state_;
};

}  // namespace fuzz
}  // namespace poseidon
