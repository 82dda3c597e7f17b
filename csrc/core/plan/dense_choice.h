// The layout of the gradients that are allreduced (dense_layout.h) under a choice of schemes. Run by rank 0 of the
// process set only, like the choice itself. Pure functions, any thread.
#pragma once

#include <vector>

#include "core/plan/chooser.h"
#include "core/plan/dense_layout.h"
#include "core/plan/offers.h"
#include "core/plan/tuning.h"

namespace poseidon {

// Gradients that messages are made of, in the order of backward. Those that may not share, are not allreduced, travel
// with another tensor, or got no gradient in the profiled step are in no slice: they travel alone.
std::vector<DenseTensor> TensorsToSlice(const Question& question, const std::vector<TensorDecision>& decisions,
                                        const std::vector<std::vector<PricedOffer>>& offers);

struct LayoutQuestion {
  std::vector<DenseTensor> tensors;
  const StepModel* idle = nullptr;    // the network as it was measured
  const StepModel* loaded = nullptr;  // and as it is within a step
  const Choice* choice = nullptr;
  std::vector<DenseSlice> in_force;  // kAuto changes it only for a gain of the margin
  bool given = false;                // the network, by the user
};

std::vector<DenseSlice> ChooseLayout(const LayoutQuestion& question, const DenseSettings& settings,
                                     const Tuning& tuning = kTuning);

}  // namespace poseidon
