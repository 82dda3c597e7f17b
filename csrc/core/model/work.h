// What one gradient costs under one scheme: all that the step model and a planner need to know of a scheme.
#pragma once

#include <cstdint>
#include <vector>

namespace poseidon {

enum class Collective : uint8_t { kAllreduce, kAllgather };

// What the processor does for one gradient, as measured. Seconds.
struct LayerCost {
  double local = 0;    // this rank's own gradient, such as the product d^T x, which a factored layer does not compute
  double input = 0;    // its input gradient, before which factors leave
  double pack = 0;     // copying rows into the message
  double rebuild = 0;  // the product over the rows of all ranks
};

// Of one tensor in one step.
struct Work {
  Collective collective = Collective::kAllreduce;
  double bytes = 0;         // as the fitted lines count: of an allreduced tensor; gathered from all ranks
  uint8_t kind = 0;         // the wire dtype: messages of one kind may be put together
  double own = 0;           // seconds of backward that make what is sent
  double lead = 0;          // seconds by which the message leaves before the layer's backward is over
  double before = 0;        // seconds of packing, on the thread that runs backward
  double after = 0;         // seconds of rebuilding, on the thread that does that
  double memory_bytes = 0;  // of what is received, beyond the gradient
  std::vector<int> covers;  // other tensors that travel along: the bias
};

// Payload bytes that one rank sends, mean over ranks, in a ring of `size`.
double SentBytes(const Work& work, int size);

}  // namespace poseidon
