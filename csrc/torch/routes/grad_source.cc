#include "torch/routes/grad_source.h"

#include <utility>

#include "core/model/cost_model.h"
#include "torch/catching.h"
#include "torch/dtypes.h"
#include "torch/layers/capture.h"
#include "torch/routes/grad_place.h"

namespace poseidon {

GradSource::GradSource(std::string name, at::Tensor param, CompressionKind compression, const WireFormat& format,
                       std::function<at::Tensor(const at::Tensor&)> compress)
    : name_(std::move(name)),
      param_(std::move(param)),
      compression_(compression),
      format_(format),
      compress_(std::move(compress)) {}

Status GradSource::PrepareWire(Buffer* wire) {
  return Catching("Cannot prepare the gradient of " + name_ + " for sending", [&] {
    at::Tensor& grad = param_.mutable_grad();
    if (!grad.defined()) grad = at::zeros_like(param_, GradOptions(param_), at::MemoryFormat::Contiguous);
    grad_ = grad.layout() == at::kStrided ? OverTheSameMemory(grad) : grad;
    at::Tensor dense = grad_.layout() == at::kStrided ? grad_ : grad_.to_dense();
    // A sum of complex numbers is the sum of their parts.
    if (dense.is_complex()) dense = at::view_as_real(dense.resolve_conj());
    if (compression_ == CompressionKind::kPython) {
      wire_ = compress_(dense).contiguous();
      restore_ = false;
    } else {
      const DType dtype = ToDType(dense.scalar_type());
      const DType wire_dtype = format_.Reduced(dtype);
      wire_ = wire_dtype == dtype ? dense.contiguous() : dense.to(ToScalarType(wire_dtype)).contiguous();
      restore_ = grad_.layout() == at::kStrided && !wire_.is_alias_of(grad_);
    }
    copied_bytes_ =
        grad_.layout() == at::kStrided && wire_.is_alias_of(grad_) ? 0 : static_cast<int64_t>(wire_.nbytes());
    *wire = ToBuffer(wire_);
    if (SizeOf(wire->dtype) == 0) {
      return Status::InvalidArgument(
          "The gradient of " + name_ + " has dtype " + c10::toString(wire_.scalar_type()) +
          ", which cannot be reduced. Leave the parameter out of the optimizer or convert it.");
    }
    return Status::OK();
  });
}

Status GradSource::RestoreFromWire() {
  return Catching("Cannot put the reduced gradient of " + name_ + " back", [&] {
    (grad_.is_complex() ? at::view_as_real(grad_) : grad_).copy_(wire_);
    return Status::OK();
  });
}

Status GradSource::FinishOnTrainingThread() {
  at::NoGradGuard no_grad;
  at::Tensor result = std::exchange(grad_, at::Tensor());
  if (!result.defined()) return Status::OK();
  if (compression_ == CompressionKind::kPython) return param_.grad().defined() ? Status::OK() : GradientRemoved(name_);
  const at::Tensor wire = std::exchange(wire_, at::Tensor());
  if (result.layout() == at::kSparse) {
    // Sparse gradients cannot take over another one's storage.
    const at::Tensor& grad = param_.grad();
    if (!grad.defined()) return GradientRemoved(name_);
    if (grad.layout() == at::kSparse) {
      grad.zero_().add_(wire.to(grad.scalar_type()).to_sparse(grad.sparse_dim()));
      return Status::OK();
    }
    result = wire;
  }
  return PutGradient(param_, name_, /*had_grad=*/true, result);
}

at::Tensor GradSource::TakeCompressed() {
  return compression_ == CompressionKind::kPython ? std::exchange(wire_, at::Tensor()) : at::Tensor();
}

}  // namespace poseidon
