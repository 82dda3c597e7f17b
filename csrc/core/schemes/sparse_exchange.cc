#include "core/schemes/sparse_exchange.h"

#include <utility>

#include "core/engine/engine.h"
#include "core/model/cost_model.h"

namespace poseidon {

SparseExchange::SparseExchange(std::string name, std::string parameter, std::shared_ptr<Receiver> receiver,
                               int process_set, int size)
    : Exchange(std::move(name), Scheme::kSparseAllgather),
      parameter_(std::move(parameter)),
      receiver_(std::move(receiver)),
      process_set_(process_set),
      size_(size) {}

void SparseExchange::SetMessage(const Buffer& indices, const Buffer& values) {
  indices_ = indices;
  values_ = values;
}

Status SparseExchange::Gather(Engine& engine, const char* what, const Buffer& mine, Allocator allocate) {
  const std::string remedy = "Use smaller batches, or sparse_as_dense=True for " + parameter_ + ".";
  Status status = engine.transport().Allgather(name() + "." + what, mine,
                                               engine.AllocatorOf(*this, mine.dtype, remedy, std::move(allocate)),
                                               process_set_, engine.CompletionOf(*this));
  if (!status.ok()) engine.CancelCompletion(*this);
  return status;
}

Status SparseExchange::Begin(Engine& engine) {
  const auto self = std::static_pointer_cast<SparseExchange>(shared_from_this());
  gathered_bytes_ = 0;
  wire_.collectives = 2;
  Status status = Gather(engine, "indices", indices_, [self](const std::vector<int64_t>& shape) {
    const Buffer buffer = self->receiver_->AllocateIndices(shape);
    self->gathered_bytes_ += buffer.bytes();
    return buffer;
  });
  if (!status.ok()) return status;
  second_ = Gather(engine, "values", values_, [self](const std::vector<int64_t>& shape) {
    const Buffer buffer = self->receiver_->AllocateValues(shape);
    self->gathered_bytes_ += buffer.bytes();
    return buffer;
  });
  return Status::OK();  // the first gather is under way, so that this one must end first
}

Status SparseExchange::Advance(Engine&, Progress* progress) {
  *progress = Progress::kDone;
  wire_.bytes_sent = AllgatherWireBytes(gathered_bytes_, size_);
  wire_.dense_bytes = wire_.bytes_sent;
  return second_;
}

}  // namespace poseidon
