// Times the collectives that the selector chooses between, over the process set's real network.
#pragma once

#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/model/alpha_beta.h"

namespace poseidon {

// What the agreed plan knows of the network. Bytes: of an allreduce those of the tensor, of an allgather those
// gathered, all ranks together. So beta holds the ring's factors for this number of ranks.
struct NetworkModel {
  AlphaBeta allreduce;
  AlphaBeta allgather;
  double skew_seconds = 0;
  bool clamped = false;

  bool known() const { return allreduce.known() && allgather.known(); }
};

struct CalibrationOptions {
  std::string name_prefix;  // of wire names
  int process_set = 0;
  int size = 1;
  double budget_seconds =
      0.5;  // per kind of collective, 2.5 times that where latency hides the bandwidth; one size is always measured
};

// Called by all ranks together, outside of any step's traffic. All ranks see the same trials, so all return the same
// model, and stop at the same size. Blocks; the caller must not hold Python's lock.
Status MeasureNetwork(Engine& engine, const CalibrationOptions& options, NetworkModel* out);

}  // namespace poseidon
