// The decision: a scheme for every tensor, a layout for what is allreduced, and a prediction of the step. Made by rank
// 0 of the process set only; the other ranks take its plan (agreement.h). Any thread.
#pragma once

#include <vector>

#include "core/plan/dense_layout.h"
#include "core/plan/offers.h"
#include "core/plan/plan.h"
#include "core/plan/profile.h"
#include "core/plan/trials.h"
#include "core/plan/tuning.h"

namespace poseidon {

// What the user decides.
struct ChooserSettings {
  Policy policy = Policy::kBytes;
  Setting setting;
  std::vector<SchemeOverride> wishes;  // one per tensor; missing ones count as kAuto
  DenseSettings dense;
  double gather_memory_bytes = 2e9;  // for what all chosen schemes receive together, on each rank
};

// Whether schemes or layout depend on how long things take.
bool GoesByTime(Policy policy, DenseMethod dense);

// What is chosen from.
struct Question {
  MergedProfile profile;
  Measured measured;            // used where the choice goes by time
  std::vector<bool> may_share;  // by tensor: its gradient may lie in a buffer with others
  // By tensor: what stays although the profile says nothing of it, because nobody used it in that step; null: nothing.
  std::vector<const TensorDecision*> kept;
  int64_t step = 0;
  int reconstruct_threads = 0;  // Plan's
  double update_seconds = 0;    // of the optimizer's own step, which follows, whatever the choice
};

// trials: of this plan's predecessors; its load becomes the one that was found. What was not measured decides nothing:
// without a network, kTime is kBytes and DenseMethod::kAuto is kLazy.
Plan Choose(const Question& question, const ChooserSettings& settings, Trials* trials, const Tuning& tuning = kTuning);

}  // namespace poseidon
