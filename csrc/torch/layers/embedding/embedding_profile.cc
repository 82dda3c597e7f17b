// EmbeddingLayer's part in the profiling step: counting, and the guard (guard.h), with G r against the sum of d r
// scattered by id.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "torch/dtypes.h"
#include "torch/guard.h"
#include "torch/layers/embedding/embedding_layer.h"
#include "torch/status_error.h"

namespace poseidon {

void EmbeddingLayer::Profile(const TableRows& rows) {
  at::NoGradGuard no_grad;
  const at::ScalarType sum_type = AccumulateType(rows.d.scalar_type());
  if (profiled_calls_ == 0) {
    profiled_type_ = rows.d.scalar_type();
    profiled_sparse_ = rows.sparse;
    probe_ = RandomProbe(weight().size(1), weight().options().dtype(sum_type).requires_grad(false));
  }
  ++profiled_calls_;
  if (rows.d.scalar_type() != profiled_type_) objection_ = "its calls differ in dtype";
  if (rows.sparse != profiled_sparse_) objection_ = "its calls differ in whether they want a sparse gradient";
  if (!objection_.empty()) return;

  std::vector<int64_t> slot_of;
  ThrowIfError(AssignSlots(rows, weight().size(0), &profiled_ids_, &slot_of));
  profiled_unique_rows_ = static_cast<int64_t>(profiled_ids_.size());
  probe_sum_.resize(profiled_ids_.size());
  probe_scale_.resize(profiled_ids_.size());
  const at::Tensor d = rows.d.to(sum_type);
  const at::Tensor d_r = at::mv(d, probe_).to(at::kDouble);
  const at::Tensor scale = at::mv(d.abs(), probe_.abs()).to(at::kDouble);
  for (size_t i = 0; i < slot_of.size(); ++i) {
    if (slot_of[i] < 0) continue;
    ++profiled_rows_;
    const int64_t source = rows.source.empty() ? static_cast<int64_t>(i) : rows.source[i];
    const double coefficient = rows.coefficient.empty() ? 1.0 : rows.coefficient[i];
    probe_sum_[slot_of[i]] += coefficient * d_r.const_data_ptr<double>()[source];
    probe_scale_[slot_of[i]] += std::abs(coefficient) * scale.const_data_ptr<double>()[source];
  }
}

void EmbeddingLayer::CheckWeight(const at::Tensor& grad) {
  at::NoGradGuard no_grad;
  checked_ = true;
  if (!objection_.empty() || profiled_calls_ == 0) return;
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const auto count = static_cast<int64_t>(profiled_ids_.size());
  const at::Tensor sums = at::from_blob(probe_sum_.data(), {count}, options);
  at::Tensor got, expected;
  if (grad.layout() == at::kSparse) {
    // By slot; rows that no call has touched come after those.
    const at::Tensor merged = grad.coalesce();
    const at::Tensor values = at::mv(merged._values().to(probe_.scalar_type()), probe_).to(at::kDouble);
    const at::Tensor ids = merged._indices()[0].contiguous();
    std::vector<double> by_slot(count);
    for (int64_t i = 0; i < ids.numel(); ++i) {
      const size_t slot = profiled_ids_.Find(static_cast<uint32_t>(ids.const_data_ptr<int64_t>()[i]));
      const double value = values.const_data_ptr<double>()[i];
      slot == IdSlots::npos ? by_slot.push_back(value) : static_cast<void>(by_slot[slot] = value);
    }
    got = at::from_blob(by_slot.data(), {static_cast<int64_t>(by_slot.size())}, options).clone();
    expected = at::zeros_like(got);
    expected.narrow(0, 0, count).copy_(sums);
  } else {
    got = at::mv(grad.to(probe_.scalar_type()), probe_);
    expected = at::zeros_like(got);
    at::Tensor ids = at::empty({count}, at::kLong);
    std::copy(profiled_ids_.ids().begin(), profiled_ids_.ids().end(), ids.data_ptr<int64_t>());
    expected.index_copy_(0, ids, sums.to(expected.scalar_type()));
  }
  const at::Tensor magnitude = at::from_blob(probe_scale_.data(), {count}, options);
  if (!Agree(got, expected, magnitude, Coarser(profiled_type_, grad.scalar_type()))) {
    objection_ = AllFinite(got) && AllFinite(expected)
                     ? "part of its gradient comes from elsewhere than embedding calls"
                     : kNotFinite;
  }
}

void EmbeddingLayer::FillProfile(TensorProfile* profile) const {
  profile->is_embedding = true;
  profile->is_linear_weight = false;
  profile->rows = RowsOfThisStep(profiled_rows_, std::max(ids_appended_, sent_ids_));
  profile->unique_rows = RowsOfThisStep(profiled_unique_rows_, std::max(rows_, sent_rows_));
  FillVerdict("an embedding call", profile);
}

void EmbeddingLayer::RestartProfile() {
  FactoredLayer::RestartProfile();
  profiled_unique_rows_ = 0;
  DropProfile();
}

void EmbeddingLayer::DropProfile() {
  probe_ = at::Tensor();
  profiled_ids_ = IdSlots();
  probe_sum_ = probe_scale_ = {};
}

}  // namespace poseidon
