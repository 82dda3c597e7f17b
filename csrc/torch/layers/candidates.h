// The layers that could send something smaller than a parameter's gradient.
#pragma once

#include <cstdint>
#include <memory>

#include "torch/layers/embedding/embedding_layer.h"
#include "torch/layers/factored_layer.h"

namespace poseidon {

struct Candidates {
  std::shared_ptr<FactoredLayer> layer;   // of a matrix: candidate linear weight, or what the plan captures
  std::shared_ptr<EmbeddingLayer> table;  // of a matrix, until it is known what it is: candidate embedding table
  int refusals = 0;                       // agreed: how often its factors were looked at in vain, or given up
  int64_t retry_plan = 0;                 // agreed: the number of the plan for which they are looked at again
};

}  // namespace poseidon
