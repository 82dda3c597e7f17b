// The agreed choice: made by rank 0 of the process set, broadcast, and confirmed by every rank comparing a hash.
// Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/model/network_calibration.h"
#include "core/plan/decision.h"
#include "core/plan/dense_layout.h"
#include "core/plan/network_load.h"

namespace poseidon {

struct StepPrediction {
  bool known = false;
  StepEstimate chosen;
  StepEstimate dense;  // everything that may be allreduced
  NetworkLoad load;    // that the network was taken to be under
};

struct Plan {
  int size = 0;                 // ranks it was made for
  int reconstruct_threads = 0;  // of the rebuild GEMM: the same everywhere, since the split may change the rounding
  int64_t made_at_step = 0;
  NetworkModel network;       // where the plan goes by time; else unknown
  StepPrediction prediction;  // likewise
  DenseMethod dense_method = DenseMethod::kFused;
  std::vector<DenseSlice> slices;         // of indices into decisions, in the order of sending
  std::vector<TensorDecision> decisions;  // in the order of RankProfile::tensors
};

// A parameter as this rank knows it, independent of what the plan says.
struct LocalTensor {
  std::string name;
  std::vector<int64_t> shape;
};

// Schemes travel by name.
std::vector<uint8_t> EncodePlan(const Plan& plan);
// kInvalidArgument for anything that EncodePlan of this version did not write, or that names a scheme which is not
// registered here; *out is then unspecified.
Status DecodePlan(const void* data, size_t size, Plan* out);

// That a plan read from rank 0 fits what this rank knows: ranks, parameters in order, and slices that send each
// allreduced gradient at most once, whole or in all of its parts. After that its indices may be used as they are.
// kInternal says what does not fit.
Status CheckPlan(const Plan& plan, int size, const std::vector<LocalTensor>& local);

// FNV-1a, 64 bits. Against accidents, not against an adversary.
uint64_t HashBytes(const void* data, size_t size);

// What ranks compare: the plan as received plus their own parameters in order. Equal hashes mean that the ranks will
// run the same collectives on the same shapes.
uint64_t HashPlan(const std::vector<uint8_t>& encoded_plan, const std::vector<LocalTensor>& local);

}  // namespace poseidon
