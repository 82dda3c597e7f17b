// A weight that linear calls use, and its bias: what is captured of them within a step, and the buffers of their exchange.
//
// Everything but the counters of live nodes and FactorLayer's methods is guarded by the owning session's mutex.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/factor_layout.h"
#include "core/profile.h"
#include "core/sfb_exchange.h"

namespace poseidon {

class FactoredLayer final : public FactorLayer, public std::enable_shared_from_this<FactoredLayer> {
 public:
  enum class Mode : uint8_t {
    kProfile,  // step 0: ordinary gradients, and the factors are looked at
    kCapture,  // SFB: the factors are sent, and no local gradient is computed
    kBypass,   // dense: calls take PyTorch's own path
  };

  FactoredLayer(std::string name, at::Tensor weight, bool fp16_wire, double scale, Reduction extra_reduction);

  const std::string& name() const { return name_; }
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& bias() const { return bias_; }  // undefined: none, or not ours
  Mode mode() const { return mode_.load(std::memory_order_acquire); }
  void set_mode(Mode mode) { mode_.store(mode, std::memory_order_release); }

  // ---- Live autograd nodes of this weight, any thread. An edge is a reference to a gradient accumulator.
  std::atomic<int> pending_nodes{0};     // created, and neither run nor destroyed
  std::atomic<int> live_weight_edges{0};
  std::atomic<int> live_bias_edges{0};

  // ---- Step 0.
  // One call's factors: counts rows and adds to the check vector. bias: the one the call used, undefined if none.
  void Profile(const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias);
  // The step's last gradients are in place (before they are sent): compares them with what the factors give.
  void CheckWeight(const at::Tensor& grad);
  void CheckBias(const at::Tensor& grad);
  // The layer's entry in the rank's profile, in any mode: a verdict once reached is kept, rows are those of the current step.
  void FillProfile(TensorProfile* profile) const;
  const at::Tensor& profiled_bias() const { return profiled_bias_; }
  // Forgets the current step's profile. A layer that joins later is profiled step by step until a plan covers it.
  void RestartProfile();
  // The step is over: its rows are no longer counted.
  void EndStepOfProfile();
  int64_t profiled_calls() const { return profiled_calls_; }
  // Takes over what another object has found out about the same weight.
  void InheritProfile(const FactoredLayer& other);
  // From now on this rank speaks against SFB.
  void Object(std::string reason) { objection_ = std::move(reason); }

  // Rows of linear calls in forward, counted in every mode: tells of changes where factors are not looked at. Any thread.
  std::atomic<int64_t> forward_rows{0};

  // ---- From the plan on.
  // bias: undefined if the layer has none or another owner reduces it. max_rows: of this rank in one message; more than
  // that are reduced here and travel as an extra gradient.
  void StartCapture(at::Tensor bias, at::ScalarType wire_type, int64_t max_rows);
  const FactorLayout& layout() const { return layout_; }
  at::ScalarType wire_type() const { return wire_type_; }
  int64_t max_rows() const { return max_rows_; }

  // False for factors that would lose digits in the agreed wire type, as when autocast has been switched off since step 0.
  bool Accepts(at::ScalarType type) const;

  // Appends a call's rows to this step's message. last_pass: no more backward passes follow in this step.
  void Append(const at::Tensor& x, const at::Tensor& d, bool last_pass);
  // The hook of a gradient accumulator of this layer ran: a backward pass has reached it.
  void EndPass();
  int64_t rows() const { return rows_; }

  // Closes the message and chooses the buffers that receive the gradients.
  Status PrepareMessage(Buffer* message, uint32_t* flags, double* pack_seconds);
  // After the exchange: sets .grad where it was missing, and starts a new step.
  void FinishStep();
  // Forgets what was captured; buffers that may still be in flight are left to their exchange.
  void DropStep();
  // .grad was just zeroed by the optimizer, in place.
  void NoteZeroed();

  // ---- FactorLayer
  Buffer AllocateGathered(const std::vector<int64_t>& shape) override;
  Status Rebuild(const Buffer& gathered, const bool add[2]) override;
  Status PrepareExtra(Part part, bool has_extra, Buffer* wire) override;
  Status RestoreExtra(Part part) override;
  bool has_bias() const override { return bias_.defined(); }

 private:
  // One gradient of the layer.
  struct Target {
    at::Tensor param;
    at::Tensor buffer;     // kept from step to step while nobody else holds it
    at::Tensor result;     // receives the gradient: .grad itself, or the buffer
    at::Tensor local;      // .grad as it was when the message was closed; undefined if there was none
    at::Tensor wire;       // extra part in flight
    bool assign = false;   // .grad becomes the result
    bool copy_back = false;  // the result is copied into .grad, which the rebuild cannot write directly
    // .grad known to hold zeros, or (several passes) what only autograd itself has added to since: identity and version.
    const c10::TensorImpl* known = nullptr;
    int64_t known_version = -1;
    bool known_zero = false;
  };

  Target& target(Part part) { return targets_[part]; }
  int64_t RowsOfThisStep() const;
  void Know(Target& target, bool zero);
  bool IsKnown(const Target& target) const;
  bool HoldsNothing(Target& target);
  void ChooseResult(Target& target, bool* has_extra);
  void DropRowsTheUserDiscarded();
  void SpillRows();

  const std::string name_;
  const at::Tensor weight_;
  at::Tensor bias_;
  const bool fp16_wire_;
  const double scale_;  // of d^T x: 1/size for an average
  const Reduction extra_reduction_;
  std::atomic<Mode> mode_{Mode::kProfile};

  FactorLayout layout_;
  at::ScalarType wire_type_ = at::kFloat;
  int64_t max_rows_ = 0;
  Target targets_[2];

  // Step 0.
  int64_t profiled_rows_ = 0;
  int64_t profiled_forward_rows_ = 0;
  int64_t profiled_calls_ = 0;
  at::ScalarType profiled_type_ = at::kFloat;
  at::Tensor profiled_bias_;
  std::string objection_;   // why not SFB; empty if nothing speaks against it
  bool checked_ = false;
  at::Tensor probe_;        // random r (N)
  at::Tensor probe_sum_;    // sum of d^T (x r) (M)
  at::Tensor probe_scale_;  // sum of |d|^T |x r|: what cancellation is measured against
  at::Tensor bias_sum_;     // column sums of d

  // The step's message.
  at::Tensor message_;
  int64_t rows_ = 0;
  bool pass_open_ = false;    // rows of the current backward pass have been appended
  bool several_passes_ = false;
  double pack_seconds_ = 0;
  at::Tensor gathered_storage_;  // kept from step to step
  at::Tensor gathered_;
};

}  // namespace poseidon
