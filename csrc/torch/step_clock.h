// A session's clock: when in a step each gradient was complete, translated into what it would have been had everything
// been dense, so that a plan can predict any choice from it whatever the choice in force; and how long whole steps
// took.
#pragma once

#include <vector>

#include "core/engine/stats.h"
#include "core/model/step_model.h"
#include "torch/parameter.h"

namespace poseidon {

// Guarded by the session's mutex.
class StepClock {
 public:
  // What the plan in force costs and spares in backward, in seconds.
  struct Undo {
    const std::vector<LayerCost>& costs;  // by parameter; may be shorter
    double contention = 0;                // how much slower backward is while something is rebuilt
    double copy = 0;                      // per byte
  };

  // ---- Marks
  void NoteZeroed() { began_ = Clock::now(); }
  void NoteUpdated();
  // Backward is over, or what of it this rank waits for: synchronize() begins. record: keep when gradients were
  // complete.
  void NoteFlushed(std::vector<Parameter>& parameters, const Undo& undo, bool record);
  // As NoteFlushed, within backward(): what follows until synchronize() is not the step's.
  void NoteReduced() { reduced_at_ = Clock::now(); }
  bool flushed_in_backward() const { return flushed_in_backward_; }
  void set_flushed_in_backward() { flushed_in_backward_ = true; }
  void NoteIdle() { idle_seconds_ = SecondsBetween(reduced_at_, Clock::now()); }
  // Step 0: an exchange that began before its plan was agreed has ended.
  void NoteDone(const ExchangeTimes& times);
  // The end of synchronize(). planned: under a plan.
  void RecordStep(bool planned);
  void EndStep();

  double SinceBegan() const { return SecondsBetween(began_, Clock::now()); }
  double update_seconds() const { return update_seconds_; }

  // ---- Histories
  // Steps from now on are not like those before.
  void ForgetSteps();
  // The next step is the first with new schemes or messages: new names, new memory.
  void NoteNewPlan(bool changed) { first_under_plan_ = changed; }
  int64_t steps_under_plan() const { return steps_under_plan_; }
  double compute_seconds() const;
  double step_seconds() const;
  double first_step_seconds() const { return first_step_seconds_; }

 private:
  Clock::time_point began_ = Clock::now();
  Clock::time_point finished_ = Clock::now();  // the last synchronize()
  Clock::time_point flushed_;
  Clock::time_point reduced_at_;
  Clock::time_point last_done_;
  bool flushed_in_backward_ = false;  // in this step
  double idle_seconds_ = 0;           // in this step, between backward() and synchronize()
  double update_seconds_ = 0;         // of the last optimizer step
  double first_step_seconds_ = 0;     // of step 0, without the agreement at its end
  std::vector<double> compute_history_;
  std::vector<double> step_history_;  // of the last steps under the plan in force, synchronize() included
  int64_t steps_under_plan_ = 0;      // that were timed since it was looked at last
  bool first_under_plan_ = false;
};

// Of how many steps the median counts.
constexpr int kTimedSteps = 3;

}  // namespace poseidon
