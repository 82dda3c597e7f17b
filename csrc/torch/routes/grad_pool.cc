#include "torch/routes/grad_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "torch/catching.h"
#include "torch/dtypes.h"
#include "torch/layers/capture.h"
#include "torch/routes/grad_place.h"

namespace poseidon {

GradPool::GradPool(std::string name, const std::vector<std::string>& names, const std::vector<at::Tensor>& params,
                   at::ScalarType wire_type)
    : name_(std::move(name)), wire_type_(wire_type) {
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    Member member;
    member.name = names[i];
    const c10::DimVector contiguous = c10::contiguous_strides(param.sizes());
    member.strides = (param.is_non_overlapping_and_dense() ? param.strides() : at::IntArrayRef(contiguous)).vec();
    member.offset = elements_;
    elements_ += param.numel();
    member.param = param;
    members_.push_back(std::move(member));
  }
}

bool GradPool::full() const {
  return std::all_of(members_.begin(), members_.end(), [](const Member& member) { return member.filled; });
}

bool GradPool::empty() const {
  return std::none_of(members_.begin(), members_.end(), [](const Member& member) { return member.filled; });
}

at::Tensor GradPool::Slot(const Member& member) const {
  // Not a view in autograd's sense: whoever gets it may detach it, or write into it, as into any tensor.
  at::Tensor slot =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(buffer_.storage()), buffer_.key_set(), buffer_.dtype());
  slot.unsafeGetTensorImpl()->set_sizes_and_strides(member.param.sizes(), member.strides, member.offset);
  return slot;
}

bool GradPool::LiesInSlot(const Member& member, const at::Tensor& grad) const {
  return buffer_.defined() && grad.layout() == at::kStrided && grad.scalar_type() == wire_type_ &&
         grad.storage().is_alias_of(buffer_.storage()) && grad.storage_offset() == member.offset &&
         grad.strides() == at::IntArrayRef(member.strides);
}

// Somebody has kept a gradient of an earlier step, which must not change now: the buffer is left to them.
void GradPool::ReleaseBufferOfOthers() {
  if (looked_at_) return;
  int64_t ours = 1;
  for (const Member& member : members_) {
    const at::Tensor& grad = member.param.grad();
    if (grad.defined() && LiesInSlot(member, grad)) ++ours;
  }
  if (!buffer_.defined() || static_cast<int64_t>(buffer_.storage().use_count()) > ours) {
    buffer_ = at::empty({elements_}, members_.front().param.options().dtype(wire_type_).requires_grad(false));
  }
  looked_at_ = true;
}

Status GradPool::Fill(size_t index, bool visible, bool fresh) {
  Member& member = members_[index];
  return Catching("Cannot prepare the gradient of " + member.name + " for sending", [&] {
    ReleaseBufferOfOthers();
    at::Tensor& grad = member.param.mutable_grad();
    member.visible = visible || grad.defined();
    if (!grad.defined()) {
      FillWithZeros(member, visible);
    } else if (!LiesInSlot(member, grad)) {
      CopyIntoSlot(member, grad, fresh);
    }
    member.filled = true;
    return Status::OK();
  });
}

void GradPool::FillWithZeros(Member& member, bool visible) {
  at::Tensor slot = Slot(member);
  slot.zero_();
  if (!visible) return;
  if (wire_type_ == GradType(member.param)) {
    member.param.mutable_grad() = std::move(slot);
  } else {
    at::Tensor zeros = at::zeros_like(member.param, GradOptions(member.param));
    member.restore = OverTheSameMemory(zeros);
    member.param.mutable_grad() = std::move(zeros);
    restore_ = true;
  }
}

void GradPool::CopyIntoSlot(Member& member, at::Tensor& grad, bool fresh) {
  const at::Tensor slot = Slot(member);
  const bool strided = grad.layout() == at::kStrided;
  const bool same = strided && grad.scalar_type() == wire_type_;
  if (same && grad.strides() == slot.strides() && !grad.is_neg()) {
    std::memcpy(slot.data_ptr(), grad.data_ptr(), grad.nbytes());
  } else {
    slot.copy_(strided ? grad : grad.to_dense());
  }
  copied_bytes_ += static_cast<int64_t>(slot.nbytes());
  if (same && (fresh || grad.storage().use_count() == 1) && !grad.is_neg()) {
    grad.set_(buffer_.storage(), member.offset, member.param.sizes(), member.strides);
  } else {
    member.restore = strided ? OverTheSameMemory(grad) : grad;
    restore_ = restore_ || strided;
  }
}

Status GradPool::PrepareWire(Buffer* wire) {
  *wire = ToBuffer(buffer_);
  return Status::OK();
}

Status GradPool::RestoreFromWire() {
  return Catching("Cannot put the reduced gradients of " + name_ + " back", [&] {
    for (const Member& member : members_) {
      if (member.restore.defined() && member.restore.layout() == at::kStrided) member.restore.copy_(Slot(member));
    }
    return Status::OK();
  });
}

Status GradPool::FinishOnTrainingThread() {
  at::NoGradGuard no_grad;
  Status status = Status::OK();
  for (Member& member : members_) {
    const Status put = member.visible ? Put(member) : Status::OK();
    if (status.ok()) status = put;
  }
  DropStep();
  return status;
}

Status GradPool::Put(const Member& member) const {
  const at::Tensor& grad = member.param.grad();
  if (grad.defined() && grad.layout() == at::kSparse && member.restore.defined()) {
    // Sparse gradients cannot take over another one's storage.
    grad.zero_().add_(Slot(member).to(grad.scalar_type()).to_sparse(grad.sparse_dim()));
    return Status::OK();
  }
  if (grad.defined() && LiesInSlot(member, grad)) return Status::OK();
  const bool restored = member.restore.defined() && member.restore.layout() == at::kStrided;
  return PutGradient(member.param, member.name, /*had_grad=*/true, restored ? member.restore : Slot(member));
}

void GradPool::DropStep() {
  for (Member& member : members_) {
    member.filled = false;
    member.restore.reset();
  }
  restore_ = looked_at_ = false;
  copied_bytes_ = 0;
}

}  // namespace poseidon
