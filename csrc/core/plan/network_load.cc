#include "core/plan/network_load.h"

#include <vector>

#include "core/base/bounds.h"

namespace poseidon {

StepModel UnderLoad(const StepModel& model, const NetworkLoad& load) {
  StepModel slower = model;
  const double allreduce = Bounded(load.allreduce, kLeastLoad, kMostLoad);
  const double allgather = Bounded(load.allgather, kLeastLoad, kMostLoad);
  slower.allreduce.alpha *= allreduce;
  slower.allreduce.beta *= allreduce;
  slower.allgather.alpha *= allgather;
  slower.allgather.beta *= allgather;
  return slower;
}

NetworkLoad LoadOf(const StepModel& model, const Choice& choice, double observed, const NetworkLoad& before,
                   const Tuning& tuning) {
  NetworkLoad load = before;
  const auto step = [&] { return SimulateStep(UnderLoad(model, load), choice).step; };
  std::vector<double*> deciding;
  for (double* kind : {&load.allreduce, &load.allgather}) {
    const double kept = *kind;
    *kind = kMostLoad;
    const double most = step();
    *kind = kLeastLoad;
    const double least = step();
    *kind = kept;
    if (most - least > tuning.least_share * least) deciding.push_back(kind);
  }
  if (deciding.empty()) return load;
  double low = kLeastLoad, high = kMostLoad;
  for (int i = 0; i < 30; ++i) {  // the step grows with the load
    const double middle = (low + high) / 2;
    for (double* kind : deciding) *kind = middle;
    (step() < observed ? low : high) = middle;
  }
  return load;
}

}  // namespace poseidon
