// What the decision makes small, of schemes and layouts alike. Pure function, any thread.
#pragma once

#include <vector>

#include "core/model/step_model.h"
#include "core/plan/tuning.h"

namespace poseidon {

inline double Objective(const StepEstimate& estimate, const Tuning& tuning = kTuning) {
  return estimate.step + tuning.busy_weight * (estimate.channel + estimate.rebuild);
}

// The mean over the networks that the step may find.
inline double Objective(const std::vector<const StepModel*>& networks, const Choice& choice,
                        const Tuning& tuning = kTuning) {
  double sum = 0;
  for (const StepModel* model : networks) sum += Objective(SimulateStep(*model, choice), tuning);
  return sum / static_cast<double>(networks.size());
}

}  // namespace poseidon
