// The choice that makes the predicted step shortest. Pure function, any thread.
#pragma once

#include <vector>

#include "core/step_model.h"

namespace poseidon {

struct TimeChoiceSettings {
  double margin = 0.02;                // what a change must gain of the time from the first complete gradient to the step's end
  double gather_memory_bytes = 2e9;    // for the gathered rows of all factored tensors together, on each rank
};

struct TimeChoice {
  std::vector<Scheme> schemes;
  StepEstimate chosen;
  StepEstimate dense;  // everything that is free to choose allreduced: what plain Horovod would take
  std::vector<bool> over_memory;  // kept dense by the memory limit
};

// alternative[i]: what tensor i may use instead of allreduce; kAllreduce where nothing. forced[i]: it has no choice and uses
// alternative[i].
//
// Starts from the best of each tensor alone, from the fewest bytes and from all-allreduce, flips one tensor or two at a time while that
// shortens the step, and takes the best result. That must beat all-allreduce, and then `current` (the choice in force; empty: none), by
// the margin, or nothing changes. The network's and the rebuilding thread's busy times count a little too, so that of
// two choices that hide all communication the one with less work wins.
TimeChoice ChooseByTime(const StepModel& model, const std::vector<Scheme>& alternative, const std::vector<bool>& forced,
                        const TimeChoiceSettings& settings, const std::vector<Scheme>& current = {});

}  // namespace poseidon
