// A buffer in which the gradients of several parameters lie side by side, so that one allreduce in place reduces them
// all. After a step the parameters' .grad, the same tensors as before, lie in its memory. Where .grad still is that in
// the next step (zero_grad(set_to_none=False)) backward adds up in the buffer itself and nothing is copied; a new .grad
// is copied into its slot as soon as it is complete.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "core/schemes/dense_exchange.h"

namespace poseidon {

// Not thread-safe: the owning session's mutex guards it, but for DenseSource's calls from the engine while an exchange
// is in flight.
class GradPool final : public DenseSource {
 public:
  // wire_type: of the buffer. Where it is not a gradient's own type, .grad keeps its memory and the result is copied
  // back. names: of the parameters, for messages.
  GradPool(std::string name, const std::vector<std::string>& names, const std::vector<at::Tensor>& params,
           at::ScalarType wire_type);

  // The member's gradient is complete. Without a gradient, zeros; `visible`: they become its .grad. fresh: .grad is a
  // tensor that autograd has just made, in memory that nobody expects it to stay in.
  Status Fill(size_t member, bool visible = true, bool fresh = false);
  bool filled(size_t member) const { return members_[member].filled; }
  bool full() const;
  bool empty() const;
  at::ScalarType wire_type() const { return wire_type_; }
  int64_t bytes() const { return elements_ * static_cast<int64_t>(c10::elementSize(wire_type_)); }

  // ---- DenseSource
  Status PrepareWire(Buffer* wire) override;  // all members must have been filled
  bool needs_restore() const override { return restore_; }
  Status RestoreFromWire() override;
  size_t gradients() const override { return members_.size(); }
  int64_t copied_bytes() const override { return copied_bytes_; }

  // Training thread, after the exchange: puts the results where the gradients are now. Starts a new step.
  Status FinishOnTrainingThread();
  // Forgets what was filled in this step.
  void DropStep();

 private:
  struct Member {
    std::string name;
    at::Tensor param;
    std::vector<int64_t> strides;  // of the slot: the parameter's, as autograd gives gradients
    int64_t offset = 0;            // elements
    bool filled = false;
    bool visible = true;  // there was a .grad, or zeros became it
    at::Tensor restore;   // .grad that cannot lie in the buffer, or whose memory others hold; a strided one over the
                          // same memory
  };

  bool LiesInSlot(const Member& member, const at::Tensor& grad) const;
  at::Tensor Slot(const Member& member) const;
  void ReleaseBufferOfOthers();
  void FillWithZeros(Member& member, bool visible);
  void CopyIntoSlot(Member& member, at::Tensor& grad, bool fresh);
  Status Put(const Member& member) const;

  const std::string name_;
  const at::ScalarType wire_type_;
  std::vector<Member> members_;
  int64_t elements_ = 0;
  at::Tensor buffer_;
  bool looked_at_ = false;  // whether somebody else holds its memory, in this step
  bool restore_ = false;
  int64_t copied_bytes_ = 0;
};

}  // namespace poseidon
