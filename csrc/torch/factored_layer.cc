#include "torch/factored_layer.h"

#include <algorithm>
#include <utility>

#include "core/cost_model.h"
#include "torch/catching.h"
#include "torch/dtypes.h"
#include "torch/factor_kernels.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

// Another tensor, with the same version counter. A tensor that Python has seen is referenced by its Python object as long as anybody
// else references it, so only references to the memory tell whether a buffer is still in use.
at::Tensor OverTheSameMemory(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

}  // namespace

FactoredLayer::FactoredLayer(Kind kind, std::string name, at::Tensor weight, bool fp16_wire, double scale)
    : scale_(scale), kind_(kind), name_(std::move(name)), weight_(std::move(weight)), fp16_wire_(fp16_wire) {
  targets_[kWeight].param = weight_;
}

void FactoredLayer::StartCapture(const Settings& settings) {
  settings_ = settings;
  targets_[kBias].param = settings_.bias;
  layout_ = LayoutFor(settings_.wire_type);
  profiled_bias_ = at::Tensor();
  DropProfile();
  set_mode(Mode::kCapture);
}

// ---- The step's message ----------------------------------------------------------------------------------------------------

void FactoredLayer::BeginAppend(bool last_pass) {
  if (pass_open_) return;
  DropRowsTheUserDiscarded();
  pass_open_ = true;
  several_passes_ = several_passes_ || !last_pass;
}

void FactoredLayer::Reserve(int64_t rows) {
  const int64_t needed = std::max<int64_t>(1, rows);
  if (message_.defined() && message_.size(0) >= needed) return;
  at::Tensor larger = at::empty({std::max(needed, rows_ * 2), layout_.row_elements()}, weight_.options().dtype(wire_type()));
  if (rows_ > 0 && message_.defined()) {
    const int64_t kept = std::min(rows_, message_.size(0));
    larger.narrow(0, 0, kept).copy_(message_.narrow(0, 0, kept));
  }
  message_ = std::move(larger);
}

bool FactoredLayer::Accepts(at::ScalarType type) const {
  return fp16_wire_ || at::promote_types(type, wire_type()) == wire_type();
}

void FactoredLayer::EndPass() {
  pass_open_ = false;
  if (!several_passes_) return;
  // Between passes .grad is the only place where a user can throw the step's gradient away. So it must exist, and from its
  // identity and version we see whether somebody else than autograd has touched it.
  at::NoGradGuard no_grad;
  for (Target& t : targets_) {
    if (!t.param.defined()) continue;
    at::Tensor& grad = t.param.mutable_grad();
    const bool zero = !grad.defined();
    if (zero) grad = ZeroGradient(t);
    Know(t, zero);
  }
}

void FactoredLayer::DropRowsTheUserDiscarded() {
  if (!several_passes_ || rows_ == 0) return;
  Target& t = targets_[kWeight];
  if (t.known == nullptr || IsKnown(t)) return;
  const at::Tensor& grad = t.param.grad();
  if (!grad.defined() || grad.unsafeGetTensorImpl() != t.known || HoldsNothing(t)) {
    ForgetRows();
    for (Target& each : targets_) each.known = nullptr;
    return;
  }
  throw StatusError(Status::FailedPrecondition(
      "The gradient of " + name_ + " was modified between two backward passes of one step. Its part that travels as " +
      (kind_ == Kind::kLinear ? "sufficient factors" : "rows") + " is not in .grad yet and cannot be modified there. Modify gradients "
      "after synchronize(), or set schemes={'" + name_ + "': 'allreduce'}."));
}

at::Tensor FactoredLayer::ZeroGradient(const Target& t) const {
  return at::zeros_like(t.param, t.param.options(), at::MemoryFormat::Contiguous);
}

void FactoredLayer::Know(Target& t, bool zero) {
  const at::Tensor& grad = t.param.grad();
  t.known = grad.unsafeGetTensorImpl();
  t.known_version = grad._version();
  t.known_zero = zero;
}

bool FactoredLayer::IsKnown(const Target& t) const {
  const at::Tensor& grad = t.param.grad();
  return grad.defined() && grad.unsafeGetTensorImpl() == t.known && grad._version() == t.known_version;
}

void FactoredLayer::NoteZeroed() {
  for (Target& t : targets_) {
    if (t.param.defined() && t.param.grad().defined()) Know(t, true);
  }
}

bool FactoredLayer::HoldsNothing(Target& t) {
  const at::Tensor& grad = t.param.grad();
  if (!grad.defined() || (IsKnown(t) && t.known_zero)) return true;
  if (grad.layout() == at::kSparse) return grad._nnz() == 0 || IsAllZero(grad._values().contiguous());
  return grad.layout() == at::kStrided && grad.is_contiguous() && IsAllZero(grad);
}

void FactoredLayer::ChooseResult(Target& t, bool* has_extra) {
  *has_extra = !HoldsNothing(t);
  t.local = t.param.grad();
  const bool writable = t.local.defined() && t.local.layout() == at::kStrided && t.local.is_contiguous() &&
                        t.local.scalar_type() == t.param.scalar_type() && t.local.sizes() == t.param.sizes();
  t.assign = !t.local.defined() || t.local.layout() != at::kStrided;
  t.copy_back = !t.assign && !writable;
  t.in_buffer = !writable;
  if (writable) {
    t.result = t.local;
    return;
  }
  t.fresh = !t.buffer.defined() || t.buffer.storage().use_count() != 1;
  if (t.fresh) t.buffer = at::empty(t.param.sizes(), t.param.options());
  t.result = OverTheSameMemory(t.buffer);
}

Status FactoredLayer::PrepareMessage(Buffer* message, uint32_t* flags, double* pack_seconds) {
  return Catching(std::string("Cannot send the ") + parts_text() + " of " + name_, [&] {
    const Clock::time_point begin = Clock::now();
    DropRowsTheUserDiscarded();
    if (rows_ > settings_.max_elements / layout_.row_elements()) SpillRows();
    bool extra[2] = {false, false};
    ChooseResult(targets_[kWeight], &extra[kWeight]);
    if (has_bias()) ChooseResult(targets_[kBias], &extra[kBias]);
    *flags = (extra[kWeight] ? kFlagExtraWeight : 0) | (extra[kBias] ? kFlagExtraBias : 0);
    const int64_t message_rows = MessageRows(rows_, *flags);
    Reserve(rows_);
    at::Tensor rows = message_.narrow(0, 0, message_rows);
    rows_ == 0 ? static_cast<void>(rows.zero_()) : CloseRows();
    *message = ToBuffer(rows);
    WriteFlag(message->data, message_rows, *flags, layout_, message->dtype);
    *pack_seconds = std::exchange(pack_seconds_, 0.0) + SecondsBetween(begin, Clock::now());
    return Status::OK();
  });
}

void FactoredLayer::FinishStep() {
  at::NoGradGuard no_grad;
  for (Target& t : targets_) {
    if (!t.param.defined()) continue;
    TakeResult(t);
    t.result = t.local = t.wire = at::Tensor();
    t.known = nullptr;
  }
  ForgetRows();
  pass_open_ = several_passes_ = false;
}

void FactoredLayer::TakeResult(Target& t) {
  if (t.assign) t.param.mutable_grad() = t.result;
  if (t.copy_back) t.local.copy_(t.result);
}

void FactoredLayer::DropStep() {
  ForgetRows();
  pack_seconds_ = 0;
  pass_open_ = several_passes_ = false;
  message_ = gathered_storage_ = gathered_ = at::Tensor();
  for (Target& t : targets_) {
    t.result = t.local = t.wire = t.buffer = at::Tensor();
    t.known = nullptr;
  }
}

// ---- FactorLayer -----------------------------------------------------------------------------------------------------------

Buffer FactoredLayer::AllocateGathered(const std::vector<int64_t>& shape) {
  const int64_t elements = shape[0] * shape[1];
  if (!gathered_storage_.defined() || gathered_storage_.numel() < elements) {
    gathered_storage_ = at::Tensor();  // before the larger one is allocated
    gathered_storage_ = at::empty({std::max<int64_t>(1, elements)}, weight_.options().dtype(wire_type()).requires_grad(false));
  }
  gathered_ = gathered_storage_.narrow(0, 0, elements).view(shape);
  return ToBuffer(gathered_);
}

Status FactoredLayer::PrepareExtra(Part part, bool has_extra, Buffer* wire) {
  return Catching("Cannot send the part of the gradient of " + name_ + " that its " + parts_text() + " do not cover", [&] {
    Target& t = targets_[part];
    const DType dtype = ToDType(t.param.scalar_type());
    const DType wire_dtype = AllreduceWireDType(dtype, fp16_wire_);
    if (has_extra) {
      at::Tensor dense = t.local.layout() == at::kStrided ? t.local : t.local.to_dense();
      t.wire = dense.to(ToScalarType(wire_dtype)).contiguous();
    } else if (wire_dtype == dtype) {
      t.wire = t.result.zero_();
    } else {
      t.wire = at::zeros(t.param.sizes(), t.param.options().dtype(ToScalarType(wire_dtype)).requires_grad(false));
    }
    *wire = ToBuffer(t.wire);
    return Status::OK();
  });
}

Status FactoredLayer::RestoreExtra(Part part) {
  return Catching("Cannot take over the reduced extra gradient of " + name_, [&] {
    Target& t = targets_[part];
    if (!t.wire.is_alias_of(t.result)) t.result.copy_(t.wire);
    t.wire = at::Tensor();
    return Status::OK();
  });
}

}  // namespace poseidon
