// Wider rows as float16, each scaled into its range (core/schemes/row_scales.h). One pass over memory, by PyTorch's
// threads.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace poseidon {

// Writes `from` (K x N, any strides, any floating dtype) into `to` (K x N, float16, unit stride within a row). Returns
// the exponent of each row: from = to * 2^exponent but for rounding. It is 0 in rows of float16, which are copied, and
// in rows that hold infinity or NaN. What float32 cannot hold becomes infinity.
std::vector<int> WriteHalfRows(const at::Tensor& from, const at::Tensor& to);

}  // namespace poseidon
