// PyTorch's element types in the core's vocabulary.
#pragma once

#include <ATen/ATen.h>

#include "core/base/dtype.h"
#include "core/transport/transport.h"

namespace poseidon {

inline DType ToDType(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    default:
      return DType::kOther;
  }
}

// For the floating types that gradients and factors have.
inline at::ScalarType ToScalarType(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat64:
      return at::kDouble;
    default:
      return at::kFloat;
  }
}

// The type in which sums are accumulated.
inline at::ScalarType AccumulateType(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// A contiguous tensor's memory, which the tensor goes on owning.
inline Buffer ToBuffer(const at::Tensor& tensor) {
  return Buffer{tensor.data_ptr(), tensor.sizes().vec(), ToDType(tensor.scalar_type())};
}

}  // namespace poseidon
