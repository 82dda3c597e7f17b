// Scales of the rows of a float16 message.
//
// float16 ends at 65504 and loses digits below 2^-14. A gradient can lie between the two where its factors do not: x of
// 1e5 with d of 1e-6. So x and d of a row, where they were wider, each travel divided by a power of two, which is
// exact, and the receiver multiplies. The divisor puts the largest magnitude between 2^12 and 2^16, so everything down
// to 2^-26 of it keeps all digits of float16.
//
// The exponents stand beside the flags (factor_layout.h), in the 16 bits of the row's last element:
//
//     bits 0-3: flags | bits 4-9: exponent of x / 4 | bits 10-15: exponent of d / 4
//
// in two's complement; 0 is not divided. Messages of other dtypes have no scales: their range is that of the factors.
// In row-sparse ones, where the gradient itself travels, all are 0.
//
// Pure functions on host memory, any thread. No alignment is required.
#ifndef POSEIDON_CORE_ROW_SCALES_H_
#define POSEIDON_CORE_ROW_SCALES_H_

#include <cstdint>

#include "core/base/dtype.h"
#include "core/schemes/factor_layout.h"

namespace poseidon {

// x = sent x * 2^x, d = sent d * 2^d. Multiples of 4, so that all of float32 fits into 6 bits.
struct RowScales {
  int x = 0;
  int d = 0;
};

inline bool HasRowScales(DType dtype) { return dtype == DType::kFloat16; }

// The exponent for values of this largest magnitude. 0 for zero, and for infinity and NaN, which no divisor changes.
int ScaleExponent(float largest);

// Of one row. Writing clears its flags: whoever writes a row of a float16 message calls this, then WriteFlag().
void WriteRowScales(void* row, const RowScales& scales, const FactorLayout& layout);
RowScales ReadRowScales(const void* row, const FactorLayout& layout);

}  // namespace poseidon

#endif  // POSEIDON_CORE_ROW_SCALES_H_
