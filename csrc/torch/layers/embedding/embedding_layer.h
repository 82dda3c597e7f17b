// An embedding table. Its rows are (id, d): those that calls touched in a step, one for each id.
//
// The gradient is dense, or a sparse tensor where the table's calls ask for one (sparse=True) in step 0.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/schemes/id_slots.h"
#include "torch/layers/embedding/table_rows.h"
#include "torch/layers/factored_layer.h"

namespace poseidon {

class EmbeddingLayer final : public FactoredLayer {
 public:
  EmbeddingLayer(std::string name, at::Tensor weight, const WireFormat& wire, double scale);

  // ---- Step 0 (embedding_profile.cc).
  void Profile(const TableRows& rows);
  bool profiled_sparse() const { return profiled_sparse_; }
  void CheckWeight(const at::Tensor& grad) override;
  void RestartProfile() override;
  void FillProfile(TensorProfile* profile) const override;

  // Adds a call's rows to this step's message, to those of equal id if there are any.
  void Append(TableRows rows, int walk, bool last_pass);
  void KeepWalk(int walk) override;

  void DropStep() override;
  Status Rebuild(const Buffer& gathered, const bool add[2]) override;
  Status PrepareExtra(Part part, bool has_extra, Buffer* wire) override;

 protected:
  std::shared_ptr<FactoredLayer> New() const override {
    return std::make_shared<EmbeddingLayer>(name(), weight(), wire_format(), scale_);
  }
  FactorLayout LayoutFor(at::ScalarType wire_type) const override;
  void DropProfile() override;
  void ForgetRows() override;
  void SpillRows() override;
  void CloseRows() override;
  void ChooseResult(Target& target, bool* has_extra) override;
  at::Tensor ZeroGradient(const Target& target) const override;
  Status TakeResult(Target& target) override;
  void DropUnfinished() override { waiting_.clear(); }
  bool HoldsUnfinished() const override { return !waiting_.empty(); }
  void NoteSent() override;

 private:
  // Rows are summed up in the message itself, if its type can hold the sums.
  bool sums_in_message() const { return wire_type() == at::kFloat || wire_type() == at::kDouble; }
  at::Tensor Sums() const;
  void Merge(const TableRows& rows);
  void ReserveSums(int64_t rows);
  at::Tensor SparseGradient(const at::Tensor& ids, const at::Tensor& values, bool coalesced) const;
  void ClearResult(Target& target);

  // Step 0.
  bool profiled_sparse_ = false;
  int64_t profiled_unique_rows_ = 0;
  IdSlots profiled_ids_;
  at::Tensor probe_;                 // random r (D)
  std::vector<double> probe_sum_;    // by slot: sum of d r
  std::vector<double> probe_scale_;  // by slot: sum of |d| |r|

  // The step's message.
  struct Call {
    int walk = 0;
    TableRows rows;
  };
  std::vector<Call> waiting_;  // for their walk to get through: rows that are merged cannot be taken back
  IdSlots slots_;              // rows_ = slots_.size()
  int64_t ids_appended_ = 0;
  int64_t sent_ids_ = 0;
  at::Tensor sums_;  // of 16-bit messages

  // The step's result.
  bool sparse_result_ = false;
  at::Tensor sparse_ids_;     // 1 x U
  at::Tensor sparse_values_;  // U x D
  // The kept buffer holds zeros in all rows but these, unless its version has changed.
  bool touched_known_ = false;
  int64_t touched_version_ = -1;
  std::vector<uint32_t> touched_;  // ascending
};

}  // namespace poseidon
