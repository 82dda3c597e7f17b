// A weight whose gradient can travel as something smaller than itself: what is captured of it within a step, and the
// buffers of its exchange. Two kinds: a linear weight with its bias (linear_layer.h) and an embedding table
// (embedding_layer.h).
//
// Everything but the counters of live nodes and FactorLayer's methods is guarded by the owning session's mutex.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/plan/profile.h"
#include "core/schemes/codec.h"
#include "core/schemes/factor_layout.h"
#include "core/schemes/scheme.h"
#include "core/schemes/sfb_exchange.h"

namespace poseidon {

class FactorsRoute;

class FactoredLayer : public FactorLayer, public std::enable_shared_from_this<FactoredLayer> {
 public:
  enum class Kind : uint8_t { kLinear, kEmbedding };
  enum class Mode : uint8_t {
    kProfile,  // step 0: ordinary gradients, and the factors are looked at
    kCapture,  // the factors are sent, and no local gradient is computed
    kBypass,   // dense: calls take PyTorch's own path
  };

  // How the plan wants it.
  struct Settings {
    at::Tensor bias;                          // undefined if there is none or another owner reduces it
    at::ScalarType factor_type = at::kFloat;  // as calls give them
    at::ScalarType wire_type = at::kFloat;
    // Of this rank in one message; more are reduced here and travel as an extra gradient.
    int64_t max_elements = 0;
    bool sparse = false;  // an embedding's gradient is a sparse tensor
  };

  FactoredLayer(Kind kind, std::string name, at::Tensor weight, const WireFormat& wire, double scale);

  Kind kind() const { return kind_; }
  Scheme scheme() const { return kind_ == Kind::kLinear ? Scheme::kSfb : Scheme::kRowSparse; }
  // For messages: what gives it a gradient, and what travels.
  const char* calls_text() const { return kind_ == Kind::kLinear ? "linear calls" : "embedding calls"; }
  const char* parts_text() const { return kind_ == Kind::kLinear ? "factors" : "rows"; }
  const std::string& name() const { return name_; }
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& bias() const { return settings_.bias; }
  Mode mode() const { return mode_.load(std::memory_order_acquire); }
  void set_mode(Mode mode) { mode_.store(mode, std::memory_order_release); }

  // ---- Live autograd nodes of this weight, any thread. An edge is a reference to a gradient accumulator.
  std::atomic<int> live_nodes{0};
  std::atomic<int> live_weight_edges{0};
  std::atomic<int> live_bias_edges{0};
  // The gradient accumulator that has the session's hook. PyTorch makes another one when a module is converted. Any
  // thread.
  std::atomic<const void*> accumulator{nullptr};

  // ---- Step 0. The kind's own Profile() counts a call and adds to the check vector.
  // On this rank some call was, or is captured, whoever was the first to profile it.
  bool profiled() const { return profiled_calls_ > 0 || mode() == Mode::kCapture; }
  // The step's last gradients are in place (before they are sent): compares them with what the factors give.
  virtual void CheckWeight(const at::Tensor& grad) = 0;
  virtual void CheckBias(const at::Tensor&) {}
  // The layer's entry in the rank's profile, in any mode: a verdict once reached is kept, rows are those of the current
  // step.
  virtual void FillProfile(TensorProfile* profile) const = 0;
  // The bias that its calls use; undefined: none.
  const at::Tensor& profiled_bias() const { return mode() == Mode::kCapture ? settings_.bias : profiled_bias_; }
  // Forgets the current step's profile. A layer that joins later is profiled step by step until a plan covers it.
  virtual void RestartProfile();
  // The step is over: its rows are no longer counted.
  void EndStepOfProfile();
  // Takes over what another object has found out about the same weight.
  void InheritProfile(const FactoredLayer& other);
  // From now on this rank speaks against anything but a dense gradient.
  void Object(std::string reason) { objection_ = std::move(reason); }

  // Rows of calls in forward, counted in every mode: tells of changes where factors are not looked at. Any thread.
  std::atomic<int64_t> forward_rows{0};

  // ---- From the plan on.
  // That sends what is captured; null if nothing is. Guarded like the rest.
  FactorsRoute* route = nullptr;
  void StartCapture(const Settings& settings);
  // Another layer for the same weight, capturing as this one, which keeps its buffers.
  std::shared_ptr<FactoredLayer> Renew() const;
  const Settings& settings() const { return settings_; }
  // Final once capture has started.
  const FactorLayout& layout() const { return layout_; }
  at::ScalarType wire_type() const { return settings_.wire_type; }

  // False for factors that would lose digits in the agreed wire type, as when autocast has been switched off since step
  // 0.
  bool Accepts(at::ScalarType type) const;

  // The kind's own Append() adds a call's rows to this step's message: those of one node in one walk. They count once
  // KeepWalk() says that the walk has got through, which is when PyTorch would add to .grad; rows of a walk that has
  // failed before never do.
  virtual void KeepWalk(int walk) = 0;
  // Every live node of this weight has handed over its rows in that walk, so none is left that could.
  bool AllNodesRan(int walk) const { return walk == walk_ && nodes_run_ == live_nodes.load(std::memory_order_acquire); }
  // Puts what the rows of earlier passes give into .grad, where a hook of the user's is about to look for it.
  void ShowHeldRows();
  // The hook of that part's gradient accumulator ran in that walk: a backward pass has reached it.
  void EndPass(Part part, int walk);

  // Closes the message and chooses the buffers that receive the gradients. reached: a backward pass has reached the
  // layer in this step, so that anything in .grad speaks against its factors.
  Status PrepareMessage(bool reached, Buffer* message, uint32_t* flags, double* pack_seconds);
  // Or, in a step without factors: adds what was captured to the ordinary local gradient in .grad, which exists
  // afterwards. Also starts a new step.
  Status MakeDense();
  // After the exchange: sets .grad where it was missing, and starts a new step.
  // kFailedPrecondition: the user has removed a gradient.
  Status FinishStep();
  // Forgets what was captured; buffers that may still be in flight are left to their exchange.
  virtual void DropStep();
  // ---- FactorLayer
  Buffer AllocateGathered(const std::vector<int64_t>& shape) override;
  Status PrepareExtra(Part part, bool has_extra, Buffer* wire) override;
  Status RestoreExtra(Part part) override;
  bool has_bias() const override { return settings_.bias.defined(); }

 protected:
  // One gradient of the layer.
  struct Target {
    at::Tensor param;
    at::Tensor buffer;   // kept from step to step while nobody else holds its memory; nobody else sees this very tensor
    bool fresh = false;  // the buffer was allocated for this step
    at::Tensor result;   // receives the gradient: over the memory of .grad itself, or of the buffer
    bool in_buffer = false;  // the latter
    at::Tensor local;  // .grad as it was when the message was closed, over the same memory; undefined if there was none
    at::Tensor wire;   // extra part in flight
    // Several passes: .grad as autograd left it after the last one.
    const c10::TensorImpl* known = nullptr;
    int64_t known_version = -1;
    bool known_zero = false;
    double mark = 0;  // what the first element of .grad is instead of zero; 0: not marked
  };

  Target& target(Part part) { return targets_[part]; }
  bool HoldsNothing(Target& target);

  // For Append(): before the first row of a call. last_pass: no more backward passes follow in this step.
  void BeginAppend(int walk, bool last_pass);
  // The message is being closed: keeps its counts for the profile.
  virtual void NoteSent() { sent_rows_ = rows_; }
  // Forgets the rows of walks that have not got through.
  virtual void DropUnfinished() = 0;
  // Some rows are of a walk that has not got through yet.
  virtual bool HoldsUnfinished() const = 0;
  // Room for that many rows in message_; the first rows_ are kept.
  void Reserve(int64_t rows);

  // ---- What the kinds differ in.
  virtual std::shared_ptr<FactoredLayer> New() const = 0;
  virtual FactorLayout LayoutFor(at::ScalarType wire_type) const = 0;
  virtual void DropProfile() = 0;  // frees what only step 0 needs
  virtual void ForgetRows() { rows_ = 0; }
  // What this step's rows are in the profile, by mode.
  int64_t RowsOfThisStep(int64_t profiled, int64_t captured) const;
  // The verdict's part of an entry.
  void FillVerdict(const char* calls, TensorProfile* profile) const;
  // More rows than one collective can take. How many rows the other ranks have is unknown, so this rank alone must get
  // by: it puts what its rows give into .grad, and that goes the way of any gradient that they do not cover. Not
  // without rows.
  virtual void SpillRows() = 0;
  // Writes into the first rows_ rows of message_ what Append() has not written yet; not the flags.
  virtual void CloseRows() {}
  virtual void ChooseResult(Target& target, bool* has_extra);
  // What .grad is between two backward passes if nothing was accumulated in it.
  virtual at::Tensor ZeroGradient(const Target& target) const;
  // The end of the step: the result becomes visible in .grad.
  virtual Status TakeResult(Target& target);

  const WireFormat& wire_format() const { return wire_format_; }

  const double scale_;  // of the sum over all ranks: 1/size for an average
  FactorLayout layout_;

  // The profiling step.
  int64_t profiled_rows_ = 0;
  int64_t profiled_calls_ = 0;
  at::ScalarType profiled_type_ = at::kFloat;
  at::Tensor profiled_bias_;
  std::string objection_;  // why not; empty if nothing speaks against it
  bool checked_ = false;

  // The step's message.
  at::Tensor message_;
  int64_t rows_ = 0;
  int64_t sent_rows_ = 0;  // of this step's message once it is closed
  double pack_seconds_ = 0;
  at::Tensor gathered_;

 private:
  bool OnlyMark(Target& target) const;
  enum class Between { kNothing, kDiscarded, kModified };
  Between WhatTheUserDid(Target& target);
  Between WhatReplacesIt(Target& target);
  void ClearMark(Target& target);
  void DropRowsTheUserDiscarded();

  const Kind kind_;
  const std::string name_;
  const at::Tensor weight_;
  const WireFormat wire_format_;
  std::atomic<Mode> mode_{Mode::kProfile};

  Settings settings_;
  Target targets_[2];
  int64_t profiled_forward_rows_ = 0;

  int walk_ = -1;      // the last in which a node has run
  int nodes_run_ = 0;  // in it
  bool several_passes_ = false;
  bool closed_ = false;          // this step's message is on its way
  at::Tensor gathered_storage_;  // kept from step to step
};

}  // namespace poseidon
