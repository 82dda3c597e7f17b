// What an optimizer asks of its session.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/model/network_calibration.h"
#include "core/plan/dense_layout.h"
#include "core/schemes/scheme.h"
#include "core/transport/transport.h"
#include "torch/routes/grad_source.h"

namespace poseidon {

struct SessionOptions {
  std::vector<std::string> names;  // unique; one per parameter, in the same order on every rank
  std::vector<at::Tensor> params;
  std::vector<std::vector<int>> groups;  // of parameter indices; parameters in no group travel alone
  Reduction reduction;
  int passes_per_step = 1;
  CompressionKind compression = CompressionKind::kNone;
  // For kPython: parameter index and gradient -> what to send, and what was received -> the gradient. Python code.
  std::function<at::Tensor(int, const at::Tensor&)> compress;
  std::function<at::Tensor(int, const at::Tensor&)> decompress;
  bool sparse_as_dense = false;
  int process_set = 0;
  int rank = 0;  // in the process set
  int size = 1;
  std::string tag;  // makes wire names unique per optimizer
  Policy policy = Policy::kBytes;
  std::vector<SchemeOverride> overrides;                                // one per parameter
  int64_t max_gathered_elements = std::numeric_limits<int64_t>::max();  // of one allgather, all ranks together
  std::string settings;  // what must be equal on all ranks, one "key=value" per line
  NetworkModel network;  // for what goes by time; measured if not known
  DenseSettings dense;
  double gather_memory_bytes = 2e9;  // TimeChoiceSettings
  bool uneven_steps = false;         // ranks may call hvd.join() while others go on
  bool reduce_in_backward = true;    // backward() returns reduced gradients (docs/reduction.md)
  // Where hooks after reduction need Python: called at the end of a backward() that may have completed the step.
  std::function<void()> reduce;
  // A hook of the user's own, called with a complete local gradient before it is sent; it may change it in place.
  // Python code.
  std::function<void(int, const at::Tensor&)> before;
  std::vector<bool> hooked;  // by parameter: `before` is called for it, so it is not factored. Empty: for none
};

}  // namespace poseidon
