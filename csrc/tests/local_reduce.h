// What an allreduce of local_transport.h computes: in the order of ranks, so that all ranks get the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/transport/transport.h"
#include "tests/half.h"

namespace poseidon {

namespace local {

// float16 is computed in float32 and rounded once.
struct Half {
  uint16_t bits;
};
template <typename T>
struct Computed {
  using Type = T;
  static T Load(const T& value) { return value; }
  static T Store(T value) { return value; }
};
template <>
struct Computed<Half> {
  using Type = float;
  static float Load(const Half& value) { return FloatFromHalf(value.bits); }
  static Half Store(float value) { return {HalfFromFloat(value)}; }
};

template <typename T>
T Scaled(T value, double factor) {
  if (factor == 1.0) return value;
  if constexpr (std::is_floating_point_v<T>) return value * static_cast<T>(factor);
  return static_cast<T>(static_cast<double>(value) * factor);
}

template <typename T>
T Combined(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return a < b ? b : a;
    case ReduceOp::kProduct:
      return static_cast<T>(a * b);
    default:
      return static_cast<T>(a + b);
  }
}

// Buffer by buffer, in loops that compilers vectorize: calibrations send megabytes.
template <typename T>
void Reduce(const std::vector<Buffer>& in_out, const Reduction& reduction) {
  using C = Computed<T>;
  const int64_t elements = in_out[0].elements();
  if (elements == 0) return;
  double postscale = reduction.postscale;
  if (reduction.op == ReduceOp::kAverage) postscale /= static_cast<double>(in_out.size());
  std::vector<typename C::Type> result(elements);
  for (size_t rank = 0; rank < in_out.size(); ++rank) {
    const T* data = static_cast<const T*>(in_out[rank].data);
    for (int64_t i = 0; i < elements; ++i) {
      const auto value = Scaled(C::Load(data[i]), reduction.prescale);
      result[i] = rank == 0 ? value : Combined(reduction.op, result[i], value);
    }
  }
  T* first = static_cast<T*>(in_out[0].data);
  for (int64_t i = 0; i < elements; ++i) first[i] = C::Store(Scaled(result[i], postscale));
  for (size_t rank = 1; rank < in_out.size(); ++rank) std::memcpy(in_out[rank].data, first, elements * sizeof(T));
}

}  // namespace local

// Types that Horovod's allreduce takes.
inline bool CanReduce(DType dtype) { return dtype != DType::kBFloat16 && dtype != DType::kOther; }

// One buffer per rank, of one shape and dtype.
inline Status ReduceInPlace(const std::string& name, const std::vector<Buffer>& in_out, const Reduction& reduction) {
  switch (in_out[0].dtype) {
    case DType::kUInt8:
      local::Reduce<uint8_t>(in_out, reduction);
      return Status::OK();
    case DType::kInt8:
      local::Reduce<int8_t>(in_out, reduction);
      return Status::OK();
    case DType::kInt16:
      local::Reduce<int16_t>(in_out, reduction);
      return Status::OK();
    case DType::kInt32:
      local::Reduce<int32_t>(in_out, reduction);
      return Status::OK();
    case DType::kInt64:
      local::Reduce<int64_t>(in_out, reduction);
      return Status::OK();
    case DType::kFloat16:
      local::Reduce<local::Half>(in_out, reduction);
      return Status::OK();
    case DType::kFloat32:
      local::Reduce<float>(in_out, reduction);
      return Status::OK();
    case DType::kFloat64:
      local::Reduce<double>(in_out, reduction);
      return Status::OK();
    default:
      return Status::InvalidArgument(name + ": Horovod cannot send " + Name(in_out[0].dtype) + ".");
  }
}

}  // namespace poseidon
