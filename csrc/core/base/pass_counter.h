// Task state of one parameter within a step: how many backward passes are still to come before its gradient is
// complete, and whether it has been sent. Counts as `_allreduce_delay` of the optimizer
// that ours replaces.
#ifndef POSEIDON_CORE_PASS_COUNTER_H_
#define POSEIDON_CORE_PASS_COUNTER_H_

namespace poseidon {

// Not thread-safe: the owning session's mutex guards it.
class PassCounter {
 public:
  enum class Event {
    kCounted,  // nothing to do: more passes to come, or sent early
    kReady,    // the last pass: send now
    kTooMany,  // a pass after the last one; not counted. The caller raises AssertionError
  };

  // passes_per_step >= 1, checked by the caller where the user sets it.
  explicit PassCounter(int passes_per_step) : passes_per_step_(passes_per_step), remaining_(passes_per_step) {}

  // One backward pass reached the parameter.
  Event OnPass() {
    if (remaining_ <= 0) return Event::kTooMany;
    touched_ = true;
    --remaining_;
    return remaining_ == 0 && !sent_ ? Event::kReady : Event::kCounted;
  }

  // All passes of the step are counted.
  bool ready() const { return remaining_ == 0; }

  // May precede the OnPass() that makes it ready: a layer's own backward node sends before the hook on the gradient
  // accumulator counts the same pass. That OnPass() then returns kCounted.
  void MarkSent() { sent_ = true; }
  bool sent() const { return sent_; }

  // At least one pass counted in this step; if not, synchronize() sends zeros (or zero rows).
  bool touched() const { return touched_; }
  int remaining() const { return remaining_; }

  // Start of a step.
  void Reset() {
    remaining_ = passes_per_step_;
    sent_ = false;
    touched_ = false;
  }

  // set_backward_passes_per_step: the step in progress starts to count anew, but what was sent stays sent.
  void SetPassesPerStep(int passes_per_step) {
    passes_per_step_ = passes_per_step;
    remaining_ = passes_per_step;
  }

 private:
  int passes_per_step_;
  int remaining_;
  bool sent_ = false;
  bool touched_ = false;
};

}  // namespace poseidon

#endif  // POSEIDON_CORE_PASS_COUNTER_H_
