#include "torch/layers/half_rows.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <ATen/TensorIterator.h>

#include "core/schemes/row_scales.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define POSEIDON_WITH_AVX2
#endif

namespace poseidon {

namespace {

constexpr int64_t kElementsPerTask = 1 << 15;

// Returns the exponent of the row. `from` and `to` have unit stride.
using RowWriter = int (*)(const float* from, int64_t elements, at::Half* to);

// Magnitudes are ordered as their bits are, infinity and NaN on top. The maximum of integers vectorises; that of
// floats, where NaN counts, does not.
inline float LargestMagnitude(const float* row, int64_t elements) {
  int32_t largest = 0;
  for (int64_t i = 0; i < elements; ++i) {
    int32_t bits;
    std::memcpy(&bits, row + i, sizeof(bits));
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float value;
  std::memcpy(&value, &largest, sizeof(value));
  return value;
}

int WriteRow(const float* from, int64_t elements, at::Half* to) {
  const int exponent = ScaleExponent(LargestMagnitude(from, elements));
  const float factor = std::ldexp(1.0f, -exponent);
  for (int64_t i = 0; i < elements; ++i) to[i] = static_cast<at::Half>(from[i] * factor);
  return exponent;
}

#ifdef POSEIDON_WITH_AVX2
// The package is built for any x86-64, which takes a dozen instructions per element for the conversion. Every processor
// with AVX2 takes one for eight.
__attribute__((target("avx2,f16c"))) int WriteRowAvx2(const float* from, int64_t elements, at::Half* to) {
  const int exponent = ScaleExponent(LargestMagnitude(from, elements));
  const float factor = std::ldexp(1.0f, -exponent);
  const __m256 factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(from + i), factors);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < elements; ++i) to[i] = static_cast<at::Half>(from[i] * factor);
  return exponent;
}
#endif

RowWriter FastestWriter() {
#ifdef POSEIDON_WITH_AVX2
  if (__builtin_cpu_supports("avx2")) return WriteRowAvx2;
#endif
  return WriteRow;
}

}  // namespace

std::vector<int> WriteHalfRows(const at::Tensor& from, const at::Tensor& to) {
  std::vector<int> exponents(from.size(0), 0);
  if (from.scalar_type() == at::kHalf || from.numel() == 0) {
    to.copy_(from);
    return exponents;
  }
  at::Tensor wide = from.to(at::kFloat);
  if (wide.stride(1) != 1) wide = wide.contiguous();
  // An iteration over the beginnings of the rows, because that runs on PyTorch's threads. at::parallel_for() does so
  // only in sources that are compiled with OpenMP.
  const at::Tensor of_rows = at::from_blob(exponents.data(), {from.size(0)}, at::dtype(at::kInt));
  at::TensorIterator rows = at::TensorIteratorConfig()
                                .set_check_mem_overlap(false)
                                .check_all_same_dtype(false)
                                .resize_outputs(false)
                                .add_output(of_rows)
                                .add_owned_output(to.select(1, 0))
                                .add_owned_const_input(wide.select(1, 0))
                                .build();
  static const RowWriter write_row = FastestWriter();
  const int64_t elements = from.size(1);
  const auto write_rows = [elements](char** data, const int64_t* strides, int64_t count, int64_t) {  // one dimension
    for (int64_t row = 0; row < count; ++row) {
      auto* exponent = reinterpret_cast<int*>(data[0] + row * strides[0]);
      auto* half = reinterpret_cast<at::Half*>(data[1] + row * strides[1]);
      *exponent = write_row(reinterpret_cast<const float*>(data[2] + row * strides[2]), elements, half);
    }
  };
  rows.for_each(write_rows, std::max<int64_t>(1, kElementsPerTask / elements));
  return exponents;
}

}  // namespace poseidon
