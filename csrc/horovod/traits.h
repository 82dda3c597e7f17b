// What Horovod 0.28.1 can do and does, as the core needs to know it. Includes none of its headers, so that transports
// of tests can stand in for it.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/transport/transport.h"

namespace poseidon {

inline Traits HorovodTraits() {
  Traits traits;
  traits.max_elements = (int64_t{1} << 31) - 2;  // its collectives count elements in an int
  traits.reduces = [](DType dtype) { return dtype != DType::kBFloat16; };
  traits.fusion_bytes = 128 << 20;  // HOROVOD_FUSION_THRESHOLD's default
  traits.who_knows_of_stalls = "Horovod's stall inspector";
  return traits;
}

// Its fusion, which copies, takes only what has equal factors. These differ by less than float32, in which Horovod
// scales all narrower types, can tell; float64 can, and stays as it is.
inline Reduction HorovodKeepApart(const Reduction& reduction, DType dtype, int number) {
  Reduction own = reduction;
  if (dtype == DType::kFloat32 || dtype == DType::kFloat16) own.postscale *= 1 + std::ldexp(number % (1 << 20), -50);
  return own;
}

}  // namespace poseidon
