// Between which bounds numbers lie that come from outside: from other ranks, from the user, from clocks. Decoders
// refuse what is out of them, writers and models move it in, so that sums and products of such numbers are finite. Each
// is far beyond what exists.
#pragma once

#include <algorithm>
#include <cstdint>

namespace poseidon {

constexpr double kMostSeconds = 1e9;  // 30 years: a step, a wait, any other duration
constexpr double kMostAlpha = 1e4;    // seconds of one collective, whatever its size
constexpr double kMostBeta = 10;      // seconds per byte
constexpr double kMostBytes = 1e18;   // of one message
// Elements of a tensor, rows of a layer. The sum over all ranks fits 64 bits.
constexpr int64_t kMostCount = int64_t{1} << 48;

// False for NaN.
inline bool IsWithin(double value, double least, double most) { return value >= least && value <= most; }

// NaN becomes `least`.
inline double Bounded(double value, double least, double most) {
  return value >= least ? std::min(value, most) : least;
}

}  // namespace poseidon
