// The choice that makes the predicted step shortest, corrected by what was measured. Pure function, any thread.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/model/step_model.h"
#include "core/plan/search.h"
#include "core/plan/tuning.h"

namespace poseidon {

// A choice that has been in force, and the steps that it gave.
struct TriedChoice {
  Choice choice;
  double seconds = 0;                                      // a step
  double total = std::numeric_limits<double>::infinity();  // seconds in force
  int64_t steps = std::numeric_limits<int64_t>::max();
};

struct TimeChoice {
  Choice choice;
  Choice plain;                   // every tensor's first allowed offer
  std::vector<bool> over_memory;  // kept plain by the memory limit
};

struct Past {
  Choice current;                  // the choice in force; empty: none
  std::vector<TriedChoice> tried;  // with the steps that were observed, the one in force included
  double plain_at_most = std::numeric_limits<double>::infinity();  // what a step with everything plain took at most
};

// The search's result must beat all-plain, and then the choice in force, by the margin, or nothing changes.
//
// Measurement overrules prediction: of the choices that have been tried the fastest is kept, unless the search's
// result, or all-plain, has not been tried and is predicted to beat even that by the margin; then it is the next to be
// tried. So the number of wrong steps that a wrong prediction costs is bounded, and what stays in force is not slower
// than all-plain where that came near. A choice that was in force briefly, and came near, is tried again: a few short
// steps say little. Where the model explains less than half of the fastest step, or a look costs next to nothing, the
// choice with the fewest bytes gets a turn although another is predicted to be better; in the latter case all-plain
// too. docs/selector.md has it as a table.
TimeChoice ChooseByTime(const StepModel& model, const Allowed& allowed, double memory_bytes, const Past& past = {},
                        const Tuning& tuning = kTuning);

}  // namespace poseidon
