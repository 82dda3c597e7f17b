// The guard of step 0: does a layer's own gradient equal what its factors give? Both sides are projected on a random
// vector r, which costs O(MN + K(M+N)) instead of O(KMN).
#pragma once

#include <ATen/ATen.h>

namespace poseidon {

// r, the same in every call; the user's own random state is not touched.
at::Tensor RandomProbe(int64_t elements, const at::TensorOptions& options);

// Of two types, the one that rounds more.
at::ScalarType Coarser(at::ScalarType a, at::ScalarType b);

// Equal up to rounding. magnitude: the same sum over absolute values, against which cancellation is measured. type: in
// which the gradient, or its factors, were rounded.
bool Agree(const at::Tensor& got, const at::Tensor& expected, const at::Tensor& magnitude, at::ScalarType type);

// An overflow, usual in the first steps with loss scaling, makes both sides useless: no verdict.
bool AllFinite(const at::Tensor& sums);
constexpr char kNotFinite[] = "its gradient was not finite when it was looked at";

}  // namespace poseidon
