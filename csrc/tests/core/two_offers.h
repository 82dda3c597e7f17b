// A tensor of the step model that may be allreduced (0) or gathered (1).
#pragma once

#include "core/model/step_model.h"

namespace poseidon {

inline StepTensor TwoOffers(double ready, double allreduce_bytes, double gather_bytes, const LayerCost& cost = {}) {
  StepTensor tensor;
  tensor.ready = ready;
  tensor.local = cost.local;
  tensor.offers.resize(2);
  Work& whole = tensor.offers[0];
  whole.bytes = allreduce_bytes;
  whole.own = cost.local;
  Work& gathered = tensor.offers[1];
  gathered.collective = Collective::kAllgather;
  gathered.bytes = gathered.memory_bytes = gather_bytes;
  gathered.lead = cost.input;
  gathered.before = cost.pack;
  gathered.after = cost.rebuild;
  return tensor;
}

inline void SetGatherBytes(StepTensor* tensor, double bytes) {
  tensor->offers[1].bytes = tensor->offers[1].memory_bytes = bytes;
}

}  // namespace poseidon
