// When a plan is looked at again. Counts in agreed values alone, so it says the same on every rank at the same step.
// Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/plan/tuning.h"

namespace poseidon {

class PlanSchedule {
 public:
  explicit PlanSchedule(const Tuning& tuning = kTuning) : tuning_(tuning) {}

  // A step is over.
  void Tick() { ++clock_; }
  // other: in the step, some tensor had far other rows than the plan expects. True if the step before had not: steps
  // from now on are not like those before.
  bool NoteRows(bool other) {
    const bool first = other && steps_of_other_rows_ == 0;
    steps_of_other_rows_ = other ? steps_of_other_rows_ + 1 : 0;
    return first;
  }
  bool AreOtherRows(double rows, double expected) const {
    return rows > 0 && (rows > expected * tuning_.rows_factor || rows * tuning_.rows_factor < expected);
  }

  bool Due() const { return clock_ >= next_at_ || rows_have_changed(); }
  // For so many steps that what was measured before counts no more.
  bool rows_have_changed() const { return steps_of_other_rows_ >= tuning_.steps_of_other_rows; }
  // Whether the clock alone makes a plan due before so many steps more are over; 1: now.
  bool DueWithin(int64_t steps) const { return clock_ + steps > next_at_; }

  // A plan cannot be made now: ranks are missing.
  void PutOff() {
    next_at_ = clock_ + tuning_.first_revision;
    steps_of_other_rows_ = 0;
  }
  // All ranks go on together, whatever number of steps each has done before.
  void Restart() {
    clock_ = 0;
    PutOff();
  }
  // A plan has been made. trial: it changed what is in force, and that is compared soon; the more often, the later.
  void Made(bool trial) {
    ++plans_;
    next_at_ = std::max(tuning_.first_revision, std::min(2 * clock_ + 2, clock_ + tuning_.most_steps_between_plans));
    if (rows_have_changed()) trials_ = 0;
    steps_of_other_rows_ = 0;
    if (trial) next_at_ = std::min(next_at_, clock_ + tuning_.steps_of_trial * ++trials_);
  }

  int64_t plans() const { return plans_; }  // made so far

 private:
  const Tuning tuning_;
  int64_t clock_ = 0;  // steps since the last Restart()
  int64_t next_at_ = 0;
  int64_t plans_ = 0;
  int64_t trials_ = 0;
  int steps_of_other_rows_ = 0;  // in a row
};

}  // namespace poseidon
