#include "torch/routes/grad_place.h"

#include <utility>

namespace poseidon {

namespace {

// PyTorch has grad_dtype since 2.10.
template <typename T>
auto WantedType(const T& param, int) -> decltype(param.grad_dtype().value_or(at::kFloat)) {
  return param.grad_dtype().value_or(param.scalar_type());
}
template <typename T>
at::ScalarType WantedType(const T& param, long) {
  return param.scalar_type();
}

}  // namespace

at::ScalarType GradType(const at::Tensor& param) { return WantedType(param, 0); }

at::TensorOptions GradOptions(const at::Tensor& param) {
  return param.options().dtype(GradType(param)).requires_grad(false);
}

bool SameMemory(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == at::kStrided && b.layout() == at::kStrided && a.scalar_type() == b.scalar_type() &&
         a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

Status PutGradient(const at::Tensor& param, const std::string& name, bool had_grad, const at::Tensor& result) {
  at::Tensor& grad = param.mutable_grad();
  if (!grad.defined()) {
    if (had_grad) return GradientRemoved(name);
    grad = result;
    return Status::OK();
  }
  if (SameMemory(grad, result)) return Status::OK();
  if (grad.layout() == at::kStrided && grad.sizes() == result.sizes()) {
    grad.detach().copy_(result);
  } else {
    grad = result;
  }
  return Status::OK();
}

Status GradientRemoved(const std::string& name) {
  return Status::FailedPrecondition(
      "The gradient of " + name +
      " was removed (.grad = None) after backward() had sent it and before step(). This rank alone would leave its "
      "update out, and ranks would differ. To leave it out on all ranks: optimizer.synchronize(), then .grad = None, "
      "then optimizer.step() inside `with optimizer.skip_synchronize()`. To discard the step on all ranks, call "
      "optimizer.zero_grad().");
}

}  // namespace poseidon
