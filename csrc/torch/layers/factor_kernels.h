// Packing, rebuilding and checking with PyTorch's CPU operators. No state; callers hold what needs holding.
#pragma once

#include <ATen/ATen.h>

#include "core/schemes/factor_layout.h"

namespace poseidon {

// torch.set_num_threads() reaches the thread that calls it, and others only once. So the training thread notes what it
// said, and what another thread computes after UseThreadsOfTorch() takes as many.
void NoteThreadsOfTorch();
void UseThreadsOfTorch();

// Copies x (K x N) and d (K x M), any strides, into rows [first, first + K) of the message, converting to its dtype. In
// a float16 message wider factors are scaled (core/schemes/row_scales.h) and the flag column is written; in others it
// is left alone.
void PackRows(const at::Tensor& x, const at::Tensor& d, const FactorLayout& layout, int64_t first, at::Tensor& message);

// weight_grad (M x N, contiguous) = scale * d^T x over all rows of the gathered message, or += where add. Sums in
// float32 (float64 for float64), also for 16-bit factors or gradients. One GEMM straight into the gradient; a 16-bit
// gradient goes through a tile of a few rows.
void RebuildWeight(const at::Tensor& gathered, const FactorLayout& layout, double scale, bool add,
                   at::Tensor& weight_grad);

// bias_grad (M) = scale * column sums of d, or += where add.
void RebuildBias(const at::Tensor& gathered, const FactorLayout& layout, double scale, bool add, at::Tensor& bias_grad);

// Reads until the first non-zero; -0.0 is zero. Contiguous tensors.
bool IsAllZero(const at::Tensor& tensor);

}  // namespace poseidon
