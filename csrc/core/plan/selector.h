// The choice of a scheme per tensor: a pure function of the merged profile and the settings, run by rank 0 of the
// process set only; the other ranks take its plan (plan.h). Any thread.
#ifndef POSEIDON_CORE_SELECTOR_H_
#define POSEIDON_CORE_SELECTOR_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/model/network_calibration.h"
#include "core/model/step_model.h"
#include "core/plan/dense_layout.h"
#include "core/plan/profile.h"
#include "core/plan/time_choice.h"
#include "core/schemes/scheme.h"

namespace poseidon {

struct SelectorSettings {
  Policy policy = Policy::kBytes;
  int size = 1;            // ranks of the process set
  bool fp16_wire = false;  // compression: gradients and factors travel in float16
};

struct TensorDecision {
  std::string name;
  Scheme scheme = Scheme::kAllreduce;
  double allreduce_bytes = 0;  // sent by one rank in one step, mean over ranks (cost_model.h); the dense size if sparse
  double sfb_bytes = -1;       // same unit; negative: SFB is not applicable
  double row_sparse_bytes = -1;  // the same for an embedding table
  double allreduce_seconds =
      -1;  // policy kTime: transfer and this tensor's own work alone, nothing hidden; negative: not known
  double gather_seconds = -1;    // the same for SFB, or for row-sparse
  int64_t global_rows = 0;       // seen in the profiling step
  std::string reason;            // why this scheme, for the report
  bool request_refused = false;  // the user asked for another scheme, which cannot be: the caller warns with `reason`
};

// What policy kTime knows besides the profile.
struct TimeInputs {
  NetworkModel network;
  bool network_given = false;    // by the user, who is taken at his word, so it is what a step has
  double contention = 0;         // StepModel's
  std::vector<LayerCost> costs;  // one per tensor; missing ones count as zeros
  TimeChoiceSettings settings;
  std::vector<Scheme> current;     // the choice in force; empty: none
  std::vector<TriedChoice> tried;  // with the steps that were observed, the one in force included
  std::vector<DenseSlice> slices;  // in force; empty: as Horovod fuses
  double copy = 0;                 // StepModel's
  NetworkLoad load;                // as it was taken to be so far
};

struct StepPrediction {
  bool known = false;
  StepEstimate chosen;
  StepEstimate dense;         // everything allreduced that may be
  NetworkLoad load;           // that the network was taken to be under
  double simulated_step = 0;  // chosen.step without what the model does not explain
};

// The step as it would be with everything dense and the network idle; allreduces as `inputs.slices` say.
StepModel MakeStepModel(const MergedProfile& profile, const std::vector<TensorDecision>& decisions,
                        const SelectorSettings& settings, const TimeInputs& inputs);
void ApplyLayout(const std::vector<DenseSlice>& slices, StepModel* model);

// Rules, first match wins:
//   sparse on any rank                                 -> kSparseAllgather
//   one rank                                           -> kAllreduce
//   override (or, without one, policy) kAllreduce      -> kAllreduce
//   not a linear weight, or SFB not possible           -> kAllreduce, the reason says why
//   override (or, without one, policy) kSfb            -> kSfb
//   policy kBytes: sfb_bytes <= allreduce_bytes        -> kSfb, else kAllreduce
//   policy kTime                                       -> ChooseByTime over all that got so far (time_choice.h)
// The last is BestScheme of Poseidon (section 3.2), with its `<=`, for the weight matrix alone: a bias is small and
// would be on both sides. No rows at all in the profiling step say nothing of later steps: kAllreduce under kBytes and
// kTime. An embedding table (used by embedding calls alone) has rules of its own, where "dense" means kSparseAllgather
// if its gradient is sparse, else kAllreduce:
//   one rank, or override (or, without one, policy) kAllreduce  -> dense
//   override kSfb, or row-sparse not possible                    -> dense, the reason says why
//   override kRowSparse, or without one policy kSfb              -> kRowSparse
//   policy kBytes: row_sparse_bytes <= what dense would send     -> kRowSparse, else dense
//   policy kTime                                                 -> as above; a sparse gradient as under kBytes
// kRowSparse asked for anything else is refused.
// overrides: one per tensor (missing ones count as kAuto). inputs: for kTime, which without them decides as kBytes.
// prediction, if given, is set where inputs are.
std::vector<TensorDecision> Select(const MergedProfile& profile, const std::vector<SchemeOverride>& overrides,
                                   const SelectorSettings& settings, const TimeInputs* inputs = nullptr,
                                   StepPrediction* prediction = nullptr);

}  // namespace poseidon

#endif  // POSEIDON_CORE_SELECTOR_H_
