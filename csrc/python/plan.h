// A plan and a session's counters as plain Python data.
#pragma once

#include <pybind11/pybind11.h>

#include "core/engine/stats.h"
#include "core/plan/plan.h"

namespace poseidon {

// Without its decisions' names and costs put into words: that is Python's part.
pybind11::object ToDict(const Plan& plan);
pybind11::dict ToDict(const StepEstimate& estimate);
pybind11::dict ToDict(const SessionStats& stats);

}  // namespace poseidon
