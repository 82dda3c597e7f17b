// Element types as the core sees them. The values travel between ranks (profile.h): append only.
#ifndef POSEIDON_CORE_DTYPE_H_
#define POSEIDON_CORE_DTYPE_H_

#include <cstdint>

namespace poseidon {

enum class DType : uint8_t {
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kOther,  // anything we only pass through (bool, complex, float8, ...); last
};

// Bytes of one element; 0 for kOther, whose size the core does not know.
int64_t SizeOf(DType dtype);
// PyTorch's spelling without "torch.", e.g. "bfloat16".
const char* Name(DType dtype);
bool IsFloating(DType dtype);

}  // namespace poseidon

#endif  // POSEIDON_CORE_DTYPE_H_
