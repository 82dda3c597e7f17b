// Predicts how long a training step takes under a given choice of offers, by simulating it: one communication channel,
// one thread that rebuilds gradients, both under the rest of backward. The recursion is that of wait-free
// backpropagation (Poseidon section 3.1; tau_c of arXiv 1711.05979's DAG sequel 1805.03812), with the transport's
// fusion and the rebuild added. It knows messages and work, and no schemes. Pure functions, any thread.
//
// All times are seconds from the step's beginning, the end of the last synchronize().
#pragma once

#include <cstddef>
#include <vector>

#include "core/model/alpha_beta.h"
#include "core/model/work.h"

namespace poseidon {

// By tensor, which of its offers it takes. An index that it does not have counts as the first.
using Choice = std::vector<int>;

struct StepTensor {
  double ready = 0;          // when its backward is over if all is as it was profiled; negative: it gets no gradient
  double local = 0;          // seconds of backward before that, which made the gradient itself
  std::vector<Work> offers;  // at least one; the first is the plain one
  int slice = -1;  // with `sliced`: those of one slice, if plain, are allreduced in one message, when all are complete;
                   // -1: alone
  bool copied = false;  // into the slice's buffer
};

struct StepModel {
  AlphaBeta allreduce;  // bytes: of the tensors
  AlphaBeta allgather;  // bytes: gathered, all ranks together
  double compute = 0;   // when the training thread enters synchronize(), everything plain
  double contention =
      0;  // share of a rebuild's time by which backward is delayed while both run; 0: cores to spare, 1: none
  double fusion_bytes = 0;  // up to which the transport puts together what it finds complete
  bool sliced = false;      // allreduces are as the tensors' slices say; else as the transport fuses them
  double copy = 0;          // seconds per byte that is copied
  std::vector<StepTensor> tensors;

  const AlphaBeta& network(Collective collective) const {
    return collective == Collective::kAllreduce ? allreduce : allgather;
  }
  // Of tensor i, which has an offer.
  const Work& Chosen(const Choice& choice, size_t i) const;
};

struct StepEstimate {
  double step = 0;     // end of the step
  double compute = 0;  // end of backward
  double channel = 0;  // the network's busy time
  double rebuild = 0;  // the rebuilding thread's

  double exposed() const { return step - compute; }
};

// The model with every number within bounds (bounds.h), an offer for each tensor, and no index out of range. The
// functions here and in core/plan take any model for this one.
StepModel Bounded(StepModel model);

// choice: one per tensor.
StepEstimate SimulateStep(const StepModel& model, const Choice& choice);

// Transfer and this tensor's own work, nothing hidden.
double SecondsAlone(const StepModel& model, const Work& work);

}  // namespace poseidon
