// The choice that makes the predicted step shortest. Pure function, any thread.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/model/step_model.h"

namespace poseidon {

struct TimeChoiceSettings {
  double margin = 0.02;  // what a change must gain of the time from the first complete gradient to the step's end
  double gather_memory_bytes = 2e9;  // for the gathered rows of all factored tensors together, on each rank
};

// What is made small: the step, and a little of the network's and the rebuilding thread's busy times.
double Objective(const StepEstimate& estimate);

// A choice that has been in force, and the steps that it gave.
struct TriedChoice {
  std::vector<Scheme> schemes;
  double seconds = 0;                                      // a step
  double total = std::numeric_limits<double>::infinity();  // seconds in force
  int64_t steps = std::numeric_limits<int64_t>::max();
};

struct TimeChoice {
  std::vector<Scheme> schemes;
  std::vector<Scheme> dense_schemes;  // everything that is free to choose allreduced
  StepEstimate chosen;
  StepEstimate dense;             // of dense_schemes: what plain Horovod would take
  std::vector<bool> over_memory;  // kept dense by the memory limit
};

// alternative[i]: what tensor i may use instead of allreduce; kAllreduce where nothing. forced[i]: it has no choice and
// uses alternative[i].
//
// Starts from the best of each tensor alone, from the fewest bytes and from all-allreduce, flips one tensor or two at a
// time while that shortens the step, and takes the best result. That must beat all-allreduce, and then `current` (the
// choice in force; empty: none), by the margin, or nothing changes. The network's and the rebuilding thread's busy
// times count a little too, so that of two choices that hide all communication the one with less work wins.
//
// Measurement overrules prediction: of the choices that have been tried the fastest is kept, unless the search's
// result, or all-allreduce, has not been tried and is predicted to beat even that by the margin; then it is the next to
// be tried. So the number of wrong steps that a wrong prediction costs is bounded, and what stays in force is not
// slower than all-allreduce where that came near. A choice that was in force for less than 0.3 s or 3 steps altogether,
// and came near, is tried again: a few short steps say little. Where the model explains less than half of the fastest
// step, or a look costs next to nothing, the choice with the fewest bytes gets a turn although another is predicted to
// be better; in the latter case all-allreduce too. dense_at_most: what a step with everything allreduced took at most,
// if that is known.
TimeChoice ChooseByTime(const StepModel& model, const std::vector<Scheme>& alternative, const std::vector<bool>& forced,
                        const TimeChoiceSettings& settings, const std::vector<Scheme>& current = {},
                        const std::vector<TriedChoice>& tried = {},
                        double dense_at_most = std::numeric_limits<double>::infinity());

}  // namespace poseidon
