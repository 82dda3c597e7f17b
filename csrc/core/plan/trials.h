// Rank 0's memory: the choices that have been in force and the steps that they gave. Other ranks take rank 0's plan,
// so theirs stays empty. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "core/plan/decision.h"
#include "core/plan/dense_layout.h"
#include "core/plan/network_load.h"
#include "core/plan/tuning.h"

namespace poseidon {

// A choice and the steps that it gave.
struct Tried {
  std::vector<Scheme> schemes;  // by tensor
  double seconds = 0;           // a step
  double total = 0;             // seconds in force
  int64_t steps = 0;
};

class Trials {
 public:
  explicit Trials(const Tuning& tuning = kTuning) : tuning_(tuning) {}

  // Before a plan is made. What is in force (nothing: none) has given `steps` steps of `seconds` each (0: not known)
  // since this was last called.
  void Observe(const std::vector<TensorDecision>& in_force, const std::vector<DenseSlice>& slices, double seconds,
               int64_t steps);
  // Once rows are others than those that choices were tried with.
  void Forget() { tried_.clear(); }

  // The choice and the layout in force.
  const std::vector<Scheme>& current() const { return current_; }
  const std::vector<DenseSlice>& slices() const { return slices_; }
  const std::vector<Tried>& tried() const { return tried_; }

  NetworkLoad load;  // as it was taken to be last

 private:
  const Tuning tuning_;
  std::vector<Scheme> current_;
  std::vector<DenseSlice> slices_;
  std::vector<Tried> tried_;
};

}  // namespace poseidon
