// Predicts how long a training step takes under a given choice of schemes, by simulating it: one communication channel,
// one thread that rebuilds gradients, both under the rest of backward. The recursion is that of wait-free
// backpropagation (Poseidon section 3.1; tau_c of arXiv 1711.05979's DAG sequel 1805.03812), with Horovod's fusion and
// the rebuild added. Pure functions, any thread.
//
// All times are seconds from the step's beginning, the end of the last synchronize().
#pragma once

#include <cstdint>
#include <vector>

#include "core/model/alpha_beta.h"
#include "core/schemes/scheme.h"

namespace poseidon {

// What the processor does for one gradient.
struct LayerCost {
  double local = 0;    // this rank's own product d^T x, which a factored layer does not compute
  double input = 0;    // its input gradient, before which factors leave
  double pack = 0;     // copying rows into the message
  double rebuild = 0;  // the product over the rows of all ranks
};

struct StepTensor {
  double ready = 0;            // when the gradient is complete if everything is dense; negative: it gets none
  double allreduce_bytes = 0;  // of the tensor on the wire
  double gather_bytes = 0;     // of all ranks' messages together
  uint8_t allreduce_kind = 0;  // messages of one kind may be fused: the wire dtype
  uint8_t gather_kind = 0;
  LayerCost cost;    // zeros where only allreduce is possible
  int carrier = -1;  // tensor whose factors, if it is factored, bring this one along: the weight of a bias; -1: none
  int slice = -1;  // with `sliced`: those of one slice are allreduced in one message, when all are complete; -1: alone
  bool copied = false;  // into the slice's buffer
};

struct StepModel {
  AlphaBeta allreduce;  // bytes: of the tensors
  AlphaBeta allgather;  // bytes: gathered, all ranks together
  double compute = 0;   // when the training thread enters synchronize(), everything dense
  double contention =
      0;  // share of a rebuild's time by which backward is delayed while both run; 0: cores to spare, 1: none
  double fusion_bytes = 128 << 20;
  bool sliced = false;  // allreduces are as the tensors' slices say; else Horovod puts together what it finds complete
  double copy = 0;      // seconds per byte that is copied
  std::vector<StepTensor> tensors;
};

struct StepEstimate {
  double step = 0;     // end of the step
  double compute = 0;  // end of backward
  double channel = 0;  // the network's busy time
  double rebuild = 0;  // the rebuilding thread's

  double exposed() const { return step - compute; }
};

// How many times slower than when it was measured idle the network is within a step, where it has the processors' work
// against it, and where collectives meet as no trial of one kind shows.
struct NetworkLoad {
  double allreduce = 1;
  double allgather = 1;
};

constexpr double kLeastLoad = 0.5, kMostLoad = 4;

// The load under which the step takes `observed` seconds under `schemes`, within these bounds. A kind of collective
// that decides too little of the step to tell keeps its load of `before`; if both decide they get the same.
NetworkLoad LoadOf(const StepModel& model, const std::vector<Scheme>& schemes, double observed,
                   const NetworkLoad& before);
// The model with such a network.
StepModel UnderLoad(const StepModel& model, const NetworkLoad& load);

// The model with every number within bounds (bounds.h). The functions here and in time_choice.h take any model for this
// one.
StepModel Bounded(StepModel model);

// schemes: one per tensor. Everything but allreduce is a gather of factors or rows.
StepEstimate SimulateStep(const StepModel& model, const std::vector<Scheme>& schemes);

}  // namespace poseidon
