#include "core/engine/census.h"

#include "core/model/cost_model.h"

namespace poseidon {

namespace {

// Squares of numbers of so many bits, over thousands of ranks, are exact in float64.
constexpr uint64_t kHashMask = (1u << 18) - 1;

}  // namespace

void Census::SetHash(uint64_t hash) {
  const auto number = static_cast<double>((hash ^ (hash >> 18) ^ (hash >> 36)) & kHashMask);
  ranks_and_sums_[0] = 1;
  ranks_and_sums_[1] = number;
  ranks_and_sums_[2] = number * number;
}

Status Census::Begin(Engine& engine) {
  wire_.collectives = 1;
  wire_.bytes_sent = AllreduceWireBytes(3, DType::kFloat64, size_);
  Status status = engine.transport().Allreduce(name(), Buffer{ranks_and_sums_, {3}, DType::kFloat64},
                                               Reduction{ReduceOp::kSum}, process_set_, engine.CompletionOf(*this));
  if (!status.ok()) engine.CancelCompletion(*this);
  return status;
}

Status Census::Advance(Engine&, Progress* progress) {
  *progress = Progress::kDone;
  return Status::OK();
}

}  // namespace poseidon
