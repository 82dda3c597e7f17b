#include "core/engine/census.h"

namespace poseidon {

namespace {

// Squares of numbers of so many bits, over thousands of ranks, are exact in float64.
constexpr uint64_t kHashMask = (1u << 18) - 1;

}  // namespace

void Census::SetHash(uint64_t hash) {
  const auto number = static_cast<double>((hash ^ (hash >> 18) ^ (hash >> 36)) & kHashMask);
  ranks_and_sums_[0] = 1;
  ranks_and_sums_[1] = number;
  ranks_and_sums_[2] = number * number;
}

}  // namespace poseidon
