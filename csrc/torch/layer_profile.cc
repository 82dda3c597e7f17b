// FactoredLayer's part in the profiling step: counting, and the guard. The guard compares the layer's own gradient with the one that
// its own factors give, through a random vector r: G r against the sum of d^T (x r). That costs O(MN + K(M+N)) instead of O(KMN).
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

#include "core/cost_model.h"
#include "torch/dtypes.h"
#include "torch/factored_layer.h"

namespace poseidon {

namespace {

constexpr uint64_t kProbeSeed = 0x706f7365;  // the user's own random state is not touched

double Epsilon(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return 1.0 / (1 << 10);
    case at::kBFloat16: return 1.0 / (1 << 7);
    case at::kDouble: return std::numeric_limits<double>::epsilon();
    default: return std::numeric_limits<float>::epsilon();
  }
}

// Right factors differ by rounding; one wrong row of 256 shows as some 3e-2.
double Tolerance(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16 ? 1e-2 : 1e-3; }

bool Agree(const at::Tensor& got, const at::Tensor& expected, const at::Tensor& magnitude, at::ScalarType type) {
  const double error = (got - expected).norm().item<double>();
  const double scale = std::max(got.norm().item<double>(), expected.norm().item<double>());
  return error <= Tolerance(type) * scale + 16 * Epsilon(type) * magnitude.norm().item<double>();
}

}  // namespace

void FactoredLayer::Profile(const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias) {
  at::NoGradGuard no_grad;
  const at::ScalarType sum_type = AccumulateType(x.scalar_type());
  if (profiled_calls_ == 0) {
    profiled_type_ = x.scalar_type();
    profiled_bias_ = bias;
    auto generator = at::detail::createCPUGenerator(kProbeSeed);
    const auto options = weight_.options().dtype(sum_type).requires_grad(false);
    probe_ = at::randn({layout_.in_features}, generator, options);
    probe_sum_ = at::zeros({layout_.out_features}, options);
    probe_scale_ = at::zeros({layout_.out_features}, options);
    bias_sum_ = at::zeros({layout_.out_features}, options);
  }
  ++profiled_calls_;
  profiled_rows_ += x.size(0);
  if (x.scalar_type() != profiled_type_) {
    objection_ = "its calls differ in dtype";
    return;
  }
  if (!bias.is_same(profiled_bias_)) {
    objection_ = "its calls differ in bias";
    return;
  }
  const at::Tensor x_r = at::mv(x.to(sum_type), probe_);
  const at::Tensor d_t = d.to(sum_type).t();
  probe_sum_.add_(at::mv(d_t, x_r));
  probe_scale_.add_(at::mv(d_t.abs(), x_r.abs()));
  if (bias.defined()) bias_sum_.add_(d_t.sum(1));
}

void FactoredLayer::CheckWeight(const at::Tensor& grad) {
  at::NoGradGuard no_grad;
  checked_ = true;
  if (!objection_.empty() || profiled_calls_ == 0) return;
  if (grad.layout() != at::kStrided) {
    objection_ = "its gradient is sparse";
    return;
  }
  const at::Tensor got = at::mv(grad.to(probe_.scalar_type()), probe_);
  // The coarser of the two roundings: under autocast the factors have 16 bits and the gradient 32.
  const at::ScalarType type = Epsilon(profiled_type_) > Epsilon(grad.scalar_type()) ? profiled_type_ : grad.scalar_type();
  if (!Agree(got, probe_sum_, probe_scale_, type)) {
    objection_ = "part of its gradient comes from elsewhere than linear calls";
  }
}

void FactoredLayer::CheckBias(const at::Tensor& grad) {
  at::NoGradGuard no_grad;
  if (!objection_.empty() || profiled_calls_ == 0) return;
  const at::ScalarType type = Epsilon(profiled_type_) > Epsilon(grad.scalar_type()) ? profiled_type_ : grad.scalar_type();
  if (grad.layout() != at::kStrided || !Agree(grad.to(bias_sum_.scalar_type()), bias_sum_, bias_sum_.abs(), type)) {
    objection_ = "part of its bias gradient comes from elsewhere than linear calls";
  }
}

void FactoredLayer::RestartProfile() {
  profiled_rows_ = profiled_calls_ = 0;
  checked_ = false;
  objection_.clear();
  profiled_bias_ = at::Tensor();
}

void FactoredLayer::InheritProfile(const FactoredLayer& other) {
  profiled_rows_ = other.profiled_rows_;
  profiled_forward_rows_ = other.profiled_forward_rows_;
  profiled_calls_ = other.profiled_calls_;
  profiled_type_ = other.profiled_type_;
  profiled_bias_ = other.profiled_bias_;
  objection_ = other.objection_;
  checked_ = other.checked_;
}

void FactoredLayer::EndStepOfProfile() {
  const int64_t rows = forward_rows.exchange(0);
  if (mode() == Mode::kProfile) profiled_forward_rows_ = rows;
}

int64_t FactoredLayer::RowsOfThisStep() const {
  switch (mode()) {
    case Mode::kProfile: return profiled_rows_;
    case Mode::kCapture: return rows_;
    case Mode::kBypass: break;
  }
  // Forward sees calls that backward may not reach; in the profiling step both were counted.
  if (profiled_forward_rows_ == 0) return profiled_rows_;
  return static_cast<int64_t>(static_cast<double>(profiled_rows_) * static_cast<double>(forward_rows) /
                              static_cast<double>(profiled_forward_rows_));
}

void FactoredLayer::FillProfile(TensorProfile* profile) const {
  profile->is_linear_weight = profiled_calls_ > 0;
  profile->factor_dtype = ToDType(profiled_type_);
  profile->rows = RowsOfThisStep();
  profile->calls = profiled_calls_;
  if (profiled_calls_ > 0) {
    profile->reason = objection_;
    if (objection_.empty() && !checked_) profile->reason = "its gradient did not arrive in the profiling step";
  } else {
    profile->reason = "not used by a linear call that we can see";
  }
  profile->sfb_allowed = profile->reason.empty();
}

}  // namespace poseidon
