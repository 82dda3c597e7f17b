// LinearLayer's part in the profiling step: counting, and the guard (guard.h), with G r against the sum of d^T (x r).
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "torch/dtypes.h"
#include "torch/guard.h"
#include "torch/layers/linear/linear_layer.h"

namespace poseidon {

void LinearLayer::Profile(const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias) {
  at::NoGradGuard no_grad;
  const at::ScalarType sum_type = AccumulateType(x.scalar_type());
  if (profiled_calls_ == 0) {
    profiled_type_ = x.scalar_type();
    profiled_bias_ = bias;
    bias_differs_ = false;
    const auto options = weight().options().dtype(sum_type).requires_grad(false);
    probe_ = RandomProbe(layout().in_features, options);
    probe_sum_ = at::zeros({layout().out_features}, options);
    probe_scale_ = at::zeros({layout().out_features}, options);
    bias_sum_ = at::zeros({layout().out_features}, options);
  }
  ++profiled_calls_;
  profiled_rows_ += x.size(0);
  if (x.scalar_type() != profiled_type_) {
    objection_ = "its calls differ in dtype";
    return;
  }
  if (!bias.is_same(profiled_bias_)) {  // then only the weight can be factored
    profiled_bias_ = at::Tensor();
    bias_differs_ = true;
  }
  const at::Tensor x_r = at::mv(x.to(sum_type), probe_);
  const at::Tensor d_t = d.to(sum_type).t();
  probe_sum_.add_(at::mv(d_t, x_r));
  probe_scale_.add_(at::mv(d_t.abs(), x_r.abs()));
  if (profiled_bias_.defined()) bias_sum_.add_(d_t.sum(1));
}

void LinearLayer::CheckWeight(const at::Tensor& grad) {
  at::NoGradGuard no_grad;
  checked_ = true;
  if (!objection_.empty() || profiled_calls_ == 0) return;
  if (grad.layout() != at::kStrided) {
    objection_ = "its gradient is sparse";
    return;
  }
  const at::Tensor got = at::mv(grad.to(probe_.scalar_type()), probe_);
  // The coarser of the two roundings: under autocast the factors have 16 bits and the gradient 32.
  const at::ScalarType type = Coarser(profiled_type_, grad.scalar_type());
  if (!Agree(got, probe_sum_, probe_scale_, type)) {
    objection_ = AllFinite(got) && AllFinite(probe_sum_) ? "part of its gradient comes from elsewhere than linear calls"
                                                         : kNotFinite;
  }
}

void LinearLayer::CheckBias(const at::Tensor& grad) {
  at::NoGradGuard no_grad;
  if (!objection_.empty() || profiled_calls_ == 0) return;
  const at::ScalarType type = Coarser(profiled_type_, grad.scalar_type());
  if (grad.layout() != at::kStrided || !Agree(grad.to(bias_sum_.scalar_type()), bias_sum_, bias_sum_.abs(), type)) {
    profiled_bias_ = at::Tensor();  // then only the weight can be factored
    bias_differs_ = true;
  }
}

void LinearLayer::FillProfile(TensorProfile* profile) const {
  profile->is_linear_weight = profiled();
  profile->rows = RowsOfThisStep(profiled_rows_, std::max(rows_, sent_rows_));
  FillVerdict("a linear call", profile);
}

}  // namespace poseidon
