// The layout of the gradients that are allreduced (dense_layout.h) under a choice of schemes. Run by rank 0 of the
// process set only, like the choice itself. Pure function, any thread.
#pragma once

#include <vector>

#include "core/plan/dense_layout.h"
#include "core/plan/profile.h"
#include "core/plan/selector.h"

namespace poseidon {

// may_share: by tensor, whether its gradient may lie in a buffer with others. Those that may not, are not allreduced,
// or got no gradient in the profiled step are in no slice: they travel alone. inputs: for the methods that go by time;
// without them kAuto is kLazy. With inputs.slices, the layout in force, kAuto changes it only for a gain of the margin.
// prediction, if given, is that of the choice and becomes that of choice and layout.
std::vector<DenseSlice> ChooseLayout(const MergedProfile& profile, const std::vector<TensorDecision>& decisions,
                                     const std::vector<bool>& may_share, const SelectorSettings& settings,
                                     const DenseSettings& dense, const TimeInputs* inputs,
                                     StepPrediction* prediction = nullptr);

}  // namespace poseidon
