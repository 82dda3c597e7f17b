// One parameter of a session, and where its gradient stands in this step.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "core/base/pass_counter.h"
#include "torch/accumulator_hook.h"
#include "torch/layers/candidates.h"

namespace poseidon {

class Route;

struct Parameter {
  // The same on all ranks.
  struct Agreed {
    bool sparse = false;      // some rank has sparse gradients for it
    bool everywhere = false;  // every rank completed its gradient in backward when that was looked at last
    bool eager = false;       // so did all that travel with it: backward() may wait for it without waiting in a circle
  };
  struct InStep {
    bool sparse = false;        // this rank's gradient is
    bool hook_ran = false;      // the user's, before reduction
    bool collected = false;     // reduced and in place
    bool sent_without = false;  // NoteWait() sent that there is none
    int order = -1;             // which of the complete gradients it was
    double ready_seconds = -1;  // gradient complete, or factors sent; from the step's beginning
  };

  int index = 0;
  at::Tensor tensor;
  std::string name;
  AccumulatorHook hook;
  bool active = false;  // has wanted a gradient at some time: takes part in every step from then on
  bool own = true;      // no other optimizer had it before
  bool hooked = false;  // agreed: the user's hook looks at its gradient before it is sent
  PassCounter counter{1};
  std::shared_ptr<Route> route;  // how its gradient travels; never null
  Candidates candidates;         // what could travel in its place
  Agreed agreed;
  InStep step;
  std::vector<double> ready_history;  // of the last steps, as if everything were dense
};

}  // namespace poseidon
