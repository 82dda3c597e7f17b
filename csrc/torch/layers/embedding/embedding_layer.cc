#include "torch/layers/embedding/embedding_layer.h"

#include <algorithm>
#include <utility>

#include "torch/catching.h"
#include "torch/dtypes.h"
#include "torch/layers/factor_kernels.h"
#include "torch/routes/grad_place.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

at::Tensor ToTensor(const std::vector<uint32_t>& ids) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(ids.size())}, at::kLong);
  std::copy(ids.begin(), ids.end(), tensor.data_ptr<int64_t>());
  return tensor;
}

}  // namespace

EmbeddingLayer::EmbeddingLayer(std::string name, at::Tensor weight, const WireFormat& wire, double scale)
    : FactoredLayer(Kind::kEmbedding, std::move(name), std::move(weight), wire, scale) {}

FactorLayout EmbeddingLayer::LayoutFor(at::ScalarType wire_type) const {
  return {IdElements(ToDType(wire_type)), weight().size(1)};
}

// ---- The step's message --------------------------------------------------------------------------------------------

at::Tensor EmbeddingLayer::Sums() const {
  return sums_in_message() ? message_.narrow(1, layout().d_offset(), layout().out_features) : sums_;
}

void EmbeddingLayer::ReserveSums(int64_t rows) {
  if (sums_in_message()) return Reserve(rows);
  const int64_t needed = std::max<int64_t>(1, rows);
  if (sums_.defined() && sums_.size(0) >= needed) return;
  const auto options = weight().options().dtype(AccumulateType(weight().scalar_type()));
  at::Tensor larger = at::empty({std::max(needed, rows_ * 2), layout().out_features}, options);
  if (rows_ > 0) larger.narrow(0, 0, rows_).copy_(sums_.narrow(0, 0, rows_));
  sums_ = std::move(larger);
}

void EmbeddingLayer::Append(TableRows rows, int walk, bool last_pass) {
  at::NoGradGuard no_grad;
  BeginAppend(walk, last_pass);
  waiting_.push_back({walk, std::move(rows)});
}

void EmbeddingLayer::KeepWalk(int walk) {
  at::NoGradGuard no_grad;
  const Clock::time_point begin = Clock::now();
  std::vector<Call> others;
  for (Call& call : std::exchange(waiting_, {})) {
    if (call.walk == walk) {
      Merge(call.rows);
    } else {
      others.push_back(std::move(call));
    }
  }
  waiting_ = std::move(others);
  pack_seconds_ += SecondsBetween(begin, Clock::now());
}

void EmbeddingLayer::Merge(const TableRows& rows) {
  std::vector<int64_t> slot_of;
  ThrowIfError(AssignSlots(rows, weight().size(0), &slots_, &slot_of));
  const auto merged = static_cast<int64_t>(slots_.size());
  ids_appended_ += static_cast<int64_t>(slot_of.size());
  ReserveSums(merged);
  const at::Tensor sums = Sums();
  sums.narrow(0, rows_, merged - rows_).zero_();
  AddToSlots(rows, slot_of, sums);
  rows_ = merged;
}

void EmbeddingLayer::NoteSent() {
  FactoredLayer::NoteSent();
  sent_ids_ = ids_appended_;
}

void EmbeddingLayer::ForgetRows() {
  rows_ = ids_appended_ = 0;
  slots_.Clear();
  waiting_.clear();
}

void EmbeddingLayer::CloseRows() {
  if (!sums_in_message()) {
    const at::Tensor d = message_.narrow(0, 0, rows_).narrow(1, layout().d_offset(), layout().out_features);
    d.copy_(sums_.narrow(0, 0, rows_));
    // No scales, because what travels is the gradient itself.
    message_.narrow(0, 0, rows_).select(1, layout().flag_offset()).zero_();
  }
  WriteIds(slots_.ids(), message_);
}

void EmbeddingLayer::SpillRows() {
  Target& t = target(kWeight);
  const at::Tensor ids = ToTensor(slots_.ids());
  const at::Tensor values =
      Sums().narrow(0, 0, rows_).to(GradType(t.param), /*non_blocking=*/false, /*copy=*/true).contiguous();
  ForgetRows();
  at::Tensor& grad = t.param.mutable_grad();
  if (!grad.defined()) grad = ZeroGradient(t);
  if (grad.layout() == at::kStrided) {
    grad.index_add_(0, ids, values);
  } else {
    grad.add_(SparseGradient(ids, values, /*coalesced=*/false));
  }
}

void EmbeddingLayer::DropStep() {
  FactoredLayer::DropStep();
  sums_ = sparse_ids_ = sparse_values_ = at::Tensor();
  touched_known_ = false;
}

// ---- The step's result ---------------------------------------------------------------------------------------------

at::Tensor EmbeddingLayer::SparseGradient(const at::Tensor& ids, const at::Tensor& values, bool coalesced) const {
  return at::_sparse_coo_tensor_unsafe(ids.view({1, ids.numel()}), values, weight().sizes(),
                                       values.options().layout(at::kSparse), coalesced);
}

at::Tensor EmbeddingLayer::ZeroGradient(const Target& t) const {
  if (!settings().sparse) return FactoredLayer::ZeroGradient(t);
  return SparseGradient(at::empty({0}, at::kLong), at::empty({0, weight().size(1)}, GradOptions(weight())),
                        /*coalesced=*/true);
}

void EmbeddingLayer::ChooseResult(Target& t, bool* has_extra) {
  // A dense gradient that is already there takes sparse ones in and stays dense, as in PyTorch.
  const at::Tensor& grad = t.param.grad();
  sparse_result_ = settings().sparse && !(grad.defined() && grad.layout() == at::kStrided);
  if (!sparse_result_) return FactoredLayer::ChooseResult(t, has_extra);
  *has_extra = !HoldsNothing(t);
  t.local = grad;
}

// A dense result that nothing else has been put into. Where it is .grad itself it holds zeros: else there would be an
// extra part.
void EmbeddingLayer::ClearResult(Target& t) {
  if (!t.in_buffer) return;
  const bool kept = touched_known_ && !t.fresh && t.buffer._version() == touched_version_;
  // Writes through .data leave no trace in the version. Those that matter are to the whole gradient, such as weight
  // decay by hand.
  if (kept && LooksZeroElsewhere(touched_, t.result)) {
    ZeroRows(touched_, t.result);
  } else {
    t.result.zero_();
  }
}

Status EmbeddingLayer::Rebuild(const Buffer&, const bool add[2]) {
  return Catching("Cannot rebuild the gradient of " + name() + " from its rows", [&] {
    UseThreadsOfTorch();
    RowGroups groups;
    Status status = GroupRows(gathered_, weight().size(0), &groups);
    if (!status.ok()) return status;
    Target& t = target(kWeight);
    if (sparse_result_ && !add[kWeight]) {
      sparse_ids_ = ToTensor(groups.ids);
      sparse_values_ = at::empty({sparse_ids_.numel(), weight().size(1)}, GradOptions(weight()));
      SumGroups(gathered_, layout(), groups, scale_, /*add=*/false, /*by_id=*/false, sparse_values_);
      return status;
    }
    if (!add[kWeight]) ClearResult(t);
    SumGroups(gathered_, layout(), groups, scale_, add[kWeight], /*by_id=*/true, t.result);
    touched_known_ = !add[kWeight];
    touched_ = std::move(groups.ids);
    return status;
  });
}

Status EmbeddingLayer::PrepareExtra(Part part, bool has_extra, Buffer* wire) {
  Target& t = target(part);
  if (!t.result.defined()) {  // sparse: the extra part is exchanged dense, once
    Status status = Catching("Cannot allocate the dense gradient of " + name(), [&] {
      t.result = at::empty(weight().sizes(), GradOptions(weight()));
      return Status::OK();
    });
    if (!status.ok()) return status;
  }
  return FactoredLayer::PrepareExtra(part, has_extra, wire);
}

Status EmbeddingLayer::TakeResult(Target& t) {
  if (!sparse_result_) {
    const Status status = FactoredLayer::TakeResult(t);
    touched_known_ = touched_known_ && t.in_buffer;
    if (touched_known_) touched_version_ = t.buffer._version();
    return status;
  }
  const at::Tensor grad =
      t.result.defined() ? t.result.to_sparse(1) : SparseGradient(sparse_ids_, sparse_values_, /*coalesced=*/true);
  sparse_ids_ = sparse_values_ = at::Tensor();
  at::Tensor& current = t.param.mutable_grad();
  if (t.local.defined() && !current.defined()) return GradientRemoved(name());
  if (current.defined() && current.layout() == at::kSparse) {
    current.copy_(grad);  // the tensor that others may hold stays .grad
  } else {
    current = grad;
  }
  return Status::OK();
}

}  // namespace poseidon
