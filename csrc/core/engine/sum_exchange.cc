#include "core/engine/sum_exchange.h"

#include "core/model/cost_model.h"

namespace poseidon {

Status SumExchange::Begin(Engine& engine) {
  wire_.collectives = 1;
  wire_.bytes_sent = AllreduceWireBytes(count_, DType::kFloat64, size_);
  Status status = engine.transport().Allreduce(name(), Buffer{numbers_, {count_}, DType::kFloat64},
                                               Reduction{ReduceOp::kSum}, process_set_, engine.CompletionOf(*this));
  if (!status.ok()) engine.CancelCompletion(*this);
  return status;
}

}  // namespace poseidon
