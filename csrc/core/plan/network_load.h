// How many times slower than when it was measured idle the network is within a step, where it has the processors' work
// against it, and where collectives meet as no trial of one kind shows. Pure functions, any thread.
#pragma once

#include "core/model/step_model.h"
#include "core/plan/tuning.h"

namespace poseidon {

struct NetworkLoad {
  double allreduce = 1;
  double allgather = 1;
};

constexpr double kLeastLoad = 0.5, kMostLoad = 4;

// The load under which the step takes `observed` seconds under `choice`, within these bounds. A kind of collective that
// decides too little of the step to tell keeps its load of `before`; if both decide they get the same.
NetworkLoad LoadOf(const StepModel& model, const Choice& choice, double observed, const NetworkLoad& before,
                   const Tuning& tuning = kTuning);
// The model with such a network.
StepModel UnderLoad(const StepModel& model, const NetworkLoad& load);

}  // namespace poseidon
