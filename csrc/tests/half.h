// float16 as its 16 bits, for a transport without torch.
#pragma once

#include <cstdint>
#include <cstring>

namespace poseidon {

inline float FloatFromHalf(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t fraction = bits & 0x3ffu;
  float value;
  if (exponent == 0) {  // zero and subnormal: fraction units of 2^-24, exact in a float
    value = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign != 0 ? -value : value;
  }
  const uint32_t wide = sign | (exponent == 0x1fu ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Rounds to nearest, ties to even.
inline uint16_t HalfFromFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;   // not a number
  if (bits >= 0x47800000u) return sign | 0x7c00u;  // 65536 and above, infinity included
  uint32_t kept;
  uint32_t dropped;
  uint32_t tie;
  if (bits < 0x38800000u) {               // below 2^-14: a multiple of 2^-24
    if (bits < 0x33000000u) return sign;  // below 2^-25
    const uint32_t shift = 126 - (bits >> 23);
    const uint32_t fraction = (bits & 0x7fffffu) | 0x800000u;
    kept = fraction >> shift;
    dropped = fraction & ((1u << shift) - 1);
    tie = 1u << (shift - 1);
  } else {
    kept = (bits - 0x38000000u) >> 13;
    dropped = bits & 0x1fffu;
    tie = 0x1000u;
  }
  // A carry into the exponent is right, up to infinity.
  if (dropped > tie || (dropped == tie && (kept & 1) != 0)) ++kept;
  return sign | static_cast<uint16_t>(kept);
}

}  // namespace poseidon
