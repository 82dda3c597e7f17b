// Puts another number in the place of one in an encoding, as no writer of ours does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace poseidon {

// False if there is not exactly one such number.
inline bool ReplaceDouble(double from, double to, std::vector<uint8_t>* bytes) {
  uint8_t old[sizeof(double)];
  std::memcpy(old, &from, sizeof(double));
  const auto at = std::search(bytes->begin(), bytes->end(), old, old + sizeof(double));
  if (at == bytes->end() || std::search(at + 1, bytes->end(), old, old + sizeof(double)) != bytes->end()) return false;
  std::memcpy(&*at, &to, sizeof(double));
  return true;
}

}  // namespace poseidon
