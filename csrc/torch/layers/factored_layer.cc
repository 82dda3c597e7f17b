#include "torch/layers/factored_layer.h"

#include <algorithm>
#include <utility>

#include "core/model/cost_model.h"
#include "torch/catching.h"
#include "torch/dtypes.h"
#include "torch/layers/capture.h"
#include "torch/layers/factor_kernels.h"
#include "torch/routes/grad_place.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

// A zero gradient that is scaled stays zero, like one that is zeroed; but the one is a mistake and the other throws
// rows away. So one element is not quite zero, too small to count in any sum. float16 has no such number.
constexpr double kMark = 1e-30;

bool CanMark(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.is_contiguous() && gradient.numel() > 0 &&
         gradient.scalar_type() != at::kHalf;
}

// Behind the version counter's back.
at::Tensor MarkedElement(const at::Tensor& gradient) {
  return gradient.detach().view({-1}).narrow(0, 0, 1).variable_data();
}

}  // namespace

FactoredLayer::FactoredLayer(Kind kind, std::string name, at::Tensor weight, const WireFormat& wire, double scale)
    : scale_(scale), kind_(kind), name_(std::move(name)), weight_(std::move(weight)), wire_format_(wire) {
  targets_[kWeight].param = weight_;
}

void FactoredLayer::StartCapture(const Settings& settings) {
  settings_ = settings;
  targets_[kBias].param = settings_.bias;
  layout_ = LayoutFor(settings_.wire_type);
  DropProfile();
  set_mode(Mode::kCapture);
}

std::shared_ptr<FactoredLayer> FactoredLayer::Renew() const {
  std::shared_ptr<FactoredLayer> other = New();
  other->InheritProfile(*this);
  other->accumulator = accumulator.load();
  other->StartCapture(settings_);
  return other;
}

// ---- Profile -------------------------------------------------------------------------------------------------------

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
  sent_rows_ = 0;
  if (mode() == Mode::kProfile) profiled_forward_rows_ = rows;
}

int64_t FactoredLayer::RowsOfThisStep(int64_t profiled, int64_t captured) const {
  if (mode() == Mode::kCapture) return captured;
  // Forward sees calls that backward may not reach; in the profiling step both were counted.
  if (mode() == Mode::kProfile || profiled_forward_rows_ == 0) return profiled;
  return static_cast<int64_t>(static_cast<double>(profiled) * static_cast<double>(forward_rows) /
                              static_cast<double>(profiled_forward_rows_));
}

void FactoredLayer::FillVerdict(const char* calls, TensorProfile* profile) const {
  const bool captured = mode() == Mode::kCapture;
  profile->factor_dtype = ToDType(captured ? settings_.factor_type : profiled_type_);
  profile->calls = profiled_calls_;
  profile->reason = objection_;
  if (captured) {  // agreed before, perhaps without a call on this rank
    profile->reason.clear();
  } else if (profiled_calls_ == 0) {
    profile->reason = std::string("not used by ") + calls + " that we can see";
  } else if (objection_.empty() && !checked_) {
    profile->reason = "its gradient did not arrive in the profiling step";
  }
  profile->sfb_allowed = profile->reason.empty();
}

// ---- The step's message --------------------------------------------------------------------------------------------

void FactoredLayer::BeginAppend(int walk, bool last_pass) {
  if (walk != walk_) {
    DropRowsTheUserDiscarded();
    walk_ = walk;
    nodes_run_ = 0;
  }
  ++nodes_run_;
  several_passes_ = several_passes_ || !last_pass;
}

void FactoredLayer::Reserve(int64_t rows) {
  const int64_t needed = std::max<int64_t>(1, rows);
  if (message_.defined() && message_.size(0) >= needed) return;
  at::Tensor larger =
      at::empty({std::max(needed, rows_ * 2), layout_.row_elements()}, weight_.options().dtype(wire_type()));
  if (rows_ > 0 && message_.defined()) {
    const int64_t kept = std::min(rows_, message_.size(0));
    larger.narrow(0, 0, kept).copy_(message_.narrow(0, 0, kept));
  }
  message_ = std::move(larger);
}

bool FactoredLayer::Accepts(at::ScalarType type) const {
  return wire_format_.codec->lossy() || at::promote_types(type, wire_type()) == wire_type();
}

void FactoredLayer::EndPass(Part part, int walk) {
  if (closed_) return;  // sent before its last pass had ended
  if (part == kWeight) KeepWalk(walk);
  Target& t = targets_[part];
  if (!several_passes_ || !t.param.defined()) return;
  // Between passes .grad is the only place where a user can throw the step's gradient away. So it must exist, and from
  // its identity and content we see whether somebody else than autograd has touched it.
  at::NoGradGuard no_grad;
  at::Tensor& grad = t.param.mutable_grad();
  const bool missing = !grad.defined();
  const bool same = !missing && grad.unsafeGetTensorImpl() == t.known;
  const bool empty = missing || (t.known == nullptr ? HoldsNothing(t) : same && t.known_zero && OnlyMark(t));
  if (missing) {
    grad = ZeroGradient(t);
    t.mark = 0;
  }
  if (empty && t.mark == 0 && CanMark(grad)) t.mark = MarkedElement(grad).fill_(kMark).item<double>();
  t.known = grad.unsafeGetTensorImpl();
  t.known_version = grad._version();
  t.known_zero = empty;
}

void FactoredLayer::ShowHeldRows() {
  if (closed_ || !several_passes_ || rows_ == 0 || HoldsUnfinished()) return;
  at::NoGradGuard no_grad;
  DropRowsTheUserDiscarded();
  if (rows_ == 0) return;
  for (Target& t : targets_) {
    if (t.param.defined()) ClearMark(t);
    t.known = nullptr;
  }
  SpillRows();
}

FactoredLayer::Between FactoredLayer::WhatTheUserDid(Target& t) {
  const at::Tensor& grad = t.param.grad();
  if (t.known == nullptr) return Between::kNothing;
  if (!grad.defined()) return Between::kDiscarded;
  if (grad.unsafeGetTensorImpl() != t.known) return WhatReplacesIt(t);
  // Zeros are looked at, because writes through .data or another library leave no trace in the version.
  const bool same_version = grad._version() == t.known_version;
  if (t.mark != 0 ? t.known_zero && OnlyMark(t) : same_version && (!t.known_zero || OnlyMark(t)))
    return Between::kNothing;
  if (t.mark != 0 && !t.known_zero && same_version) return Between::kNothing;
  if (t.mark != 0) {
    const double mark = MarkedElement(grad).item<double>();
    if (mark == t.mark && HoldsNothing(t)) return Between::kNothing;
    if (mark != 0) return Between::kModified;
  }
  return HoldsNothing(t) ? Between::kDiscarded : Between::kModified;
}

// .grad is another tensor. One with the mark is a copy, and nothing is lost. Zeros without it throw the gradient away,
// unless a copy would look like that too.
FactoredLayer::Between FactoredLayer::WhatReplacesIt(Target& t) {
  const bool marked = t.mark != 0;
  if (t.known_zero && marked && OnlyMark(t)) {
    const at::Tensor& grad = t.param.grad();
    t.known = grad.unsafeGetTensorImpl();
    t.known_version = grad._version();
    return Between::kNothing;
  }
  const bool copy_would_differ = marked || !t.known_zero;
  return copy_would_differ && HoldsNothing(t) ? Between::kDiscarded : Between::kModified;
}

void FactoredLayer::DropRowsTheUserDiscarded() {
  if (!several_passes_ || rows_ == 0) return;
  const Between weight = WhatTheUserDid(targets_[kWeight]);
  const bool with_bias = has_bias() && targets_[kBias].known != nullptr;
  const Between bias = with_bias ? WhatTheUserDid(targets_[kBias]) : weight;
  if (weight == Between::kNothing && bias == Between::kNothing) return;
  if (weight == Between::kDiscarded && bias == Between::kDiscarded) {
    ForgetRows();
    for (Target& each : targets_) each.known = nullptr;
    return;
  }
  Throw(Status::FailedPrecondition(
      "The gradient of " + name_ + " was modified between two backward passes of one step. Its part that travels as " +
      (kind_ == Kind::kLinear ? "sufficient factors" : "rows") +
      " is not in .grad yet and cannot be modified there. Modify gradients after the last backward pass, or set "
      "schemes={'" +
      name_ + "': 'allreduce'}."));
}

at::Tensor FactoredLayer::ZeroGradient(const Target& t) const {
  return at::zeros_like(t.param, GradOptions(t.param), at::MemoryFormat::Contiguous);
}

// .grad is as EndPass() made it: zeros but for the mark.
bool FactoredLayer::OnlyMark(Target& t) const {
  const at::Tensor& grad = t.param.grad();
  if (grad.layout() == at::kSparse) return grad._nnz() == 0 || IsAllZero(grad._values().contiguous());
  if (grad.layout() != at::kStrided || !grad.is_contiguous()) return false;
  if (t.mark == 0) return IsAllZero(grad);
  at::Tensor element = MarkedElement(grad);
  if (element.item<double>() != t.mark) return false;
  element.zero_();
  const bool only = IsAllZero(grad);
  element.fill_(t.mark);
  return only;
}

void FactoredLayer::ClearMark(Target& t) {
  const double mark = std::exchange(t.mark, 0.0);
  const at::Tensor& grad = t.param.grad();
  if (mark == 0 || !grad.defined() || !CanMark(grad)) return;
  at::Tensor element = MarkedElement(grad);
  if (element.item<double>() == mark) element.zero_();
}

// Always by reading it: only the content tells what is ours to replace.
bool FactoredLayer::HoldsNothing(Target& t) {
  ClearMark(t);
  const at::Tensor& grad = t.param.grad();
  if (!grad.defined()) return true;
  if (grad.layout() == at::kSparse) return grad._nnz() == 0 || IsAllZero(grad._values().contiguous());
  return grad.layout() == at::kStrided && grad.is_contiguous() && IsAllZero(grad);
}

void FactoredLayer::ChooseResult(Target& t, bool* has_extra) {
  *has_extra = !HoldsNothing(t);
  const at::Tensor& grad = t.param.grad();
  t.local = grad.defined() && grad.layout() == at::kStrided ? OverTheSameMemory(grad) : grad;
  const at::ScalarType type = GradType(t.param);
  const bool writable = t.local.defined() && t.local.layout() == at::kStrided && t.local.is_contiguous() &&
                        t.local.scalar_type() == type && t.local.sizes() == t.param.sizes();
  t.in_buffer = !writable;
  if (writable) {
    t.result = t.local;
    return;
  }
  t.fresh = !t.buffer.defined() || t.buffer.storage().use_count() != 1 || t.buffer.scalar_type() != type ||
            t.buffer.sizes() != t.param.sizes();
  if (t.fresh) t.buffer = at::empty(t.param.sizes(), GradOptions(t.param));
  t.result = OverTheSameMemory(t.buffer);
}

Status FactoredLayer::PrepareMessage(bool reached, Buffer* message, uint32_t* flags, double* pack_seconds) {
  return Catching(std::string("Cannot send the ") + parts_text() + " of " + name_, [&] {
    const Clock::time_point begin = Clock::now();
    closed_ = true;
    DropUnfinished();
    DropRowsTheUserDiscarded();
    NoteSent();
    reached = reached || rows_ > 0;
    if (rows_ > settings_.max_elements / layout_.row_elements()) SpillRows();
    bool extra[2] = {false, false};
    ChooseResult(targets_[kWeight], &extra[kWeight]);
    if (has_bias()) ChooseResult(targets_[kBias], &extra[kBias]);
    *flags = (extra[kWeight] ? kFlagExtraWeight : 0) | (extra[kBias] ? kFlagExtraBias : 0);
    if (*flags != 0 && reached) *flags |= kFlagForeign;
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

Status FactoredLayer::MakeDense() {
  return Catching(std::string("Cannot make a dense gradient of the ") + parts_text() + " of " + name_, [&] {
    DropUnfinished();
    DropRowsTheUserDiscarded();
    for (Target& t : targets_) {
      if (t.param.defined()) ClearMark(t);
    }
    if (rows_ > 0) SpillRows();
    for (Target& t : targets_) {
      if (!t.param.defined()) continue;
      at::Tensor& grad = t.param.mutable_grad();
      if (!grad.defined()) grad = ZeroGradient(t);
      t.buffer = at::Tensor();  // .grad may be over this memory, and an allreduce leaves no trace in the version
      t.known = nullptr;
    }
    ForgetRows();
    pack_seconds_ = 0;
    several_passes_ = closed_ = false;
    return Status::OK();
  });
}

Status FactoredLayer::FinishStep() {
  at::NoGradGuard no_grad;
  Status status = Status::OK();
  for (Target& t : targets_) {
    if (!t.param.defined()) continue;
    const Status taken = TakeResult(t);
    if (status.ok()) status = taken;
    t.result = t.local = t.wire = at::Tensor();
    t.known = nullptr;
  }
  ForgetRows();
  several_passes_ = closed_ = false;
  return status;
}

Status FactoredLayer::TakeResult(Target& t) {
  const std::string name = &t == &targets_[kWeight] ? name_ : "the bias of " + name_;
  return PutGradient(t.param, name, t.local.defined(), t.result);
}

void FactoredLayer::DropStep() {
  ForgetRows();
  pack_seconds_ = 0;
  several_passes_ = closed_ = false;
  message_ = gathered_storage_ = gathered_ = at::Tensor();
  for (Target& t : targets_) {
    t.result = t.local = t.wire = t.buffer = at::Tensor();
    t.known = nullptr;
    t.mark = 0;
  }
}

// ---- FactorLayer ---------------------------------------------------------------------------------------------------

Buffer FactoredLayer::AllocateGathered(const std::vector<int64_t>& shape) {
  const int64_t elements = shape[0] * shape[1];
  if (!gathered_storage_.defined() || gathered_storage_.numel() < elements) {
    gathered_storage_ = at::Tensor();  // before the larger one is allocated
    gathered_storage_ =
        at::empty({std::max<int64_t>(1, elements)}, weight_.options().dtype(wire_type()).requires_grad(false));
  }
  gathered_ = gathered_storage_.narrow(0, 0, elements).view(shape);
  return ToBuffer(gathered_);
}

Status FactoredLayer::PrepareExtra(Part part, bool has_extra, Buffer* wire) {
  return Catching("Cannot send the part of the gradient of " + name_ + " that its " + parts_text() + " do not cover",
                  [&] {
                    Target& t = targets_[part];
                    const DType dtype = ToDType(t.result.scalar_type());
                    const DType wire_dtype = wire_format_.Reduced(dtype);
                    if (has_extra) {
                      at::Tensor dense = t.local.layout() == at::kStrided ? t.local : t.local.to_dense();
                      t.wire = dense.to(ToScalarType(wire_dtype)).contiguous();
                    } else if (wire_dtype == dtype) {
                      t.wire = t.result.zero_();
                    } else {
                      t.wire = at::zeros(t.param.sizes(), GradOptions(t.param).dtype(ToScalarType(wire_dtype)));
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
