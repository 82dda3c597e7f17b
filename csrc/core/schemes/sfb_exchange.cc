#include "core/schemes/sfb_exchange.h"

#include <utility>

#include "core/engine/engine.h"
#include "core/model/cost_model.h"

namespace poseidon {

SfbExchange::SfbExchange(std::string name, std::shared_ptr<FactorLayer> layer, const Options& options)
    : Exchange(std::move(name), options.scheme), layer_(std::move(layer)), options_(options) {}

void SfbExchange::SetMessage(const Buffer& message, uint32_t flags, double pack_seconds) {
  message_ = message;
  local_flags_ = flags;
  pack_seconds_ = pack_seconds;
}

Status SfbExchange::Begin(Engine& engine) {
  gathered_ = Buffer{};
  gathered_flags_ = 0;
  extra_in_flight_ = false;
  times_.pack_seconds = pack_seconds_;
  wire_.collectives = 1;
  wire_.dense_bytes = options_.dense_bytes;
  auto allocate = [self =
                       std::static_pointer_cast<SfbExchange>(shared_from_this())](const std::vector<int64_t>& shape) {
    self->times_.wire_begin = Clock::now();
    self->gathered_ = self->layer_->AllocateGathered(shape);
    return self->gathered_;
  };
  const std::string remedy = "Use smaller batches or schemes={'" + options_.parameter +
                             "': 'allreduce'}; policy='time' keeps to memory_limit.";
  Status status = engine.transport().Allgather(name(), message_,
                                               engine.AllocatorOf(*this, message_.dtype, remedy, std::move(allocate)),
                                               options_.process_set, engine.CompletionOf(*this));
  if (!status.ok()) engine.CancelCompletion(*this);
  return status;
}

Status SfbExchange::Advance(Engine& engine, Progress* progress) {
  if (!extra_in_flight_) {
    wire_.bytes_sent = AllgatherWireBytes(gathered_.bytes(), options_.size);
    gathered_flags_ = ReadFlags(gathered_.data, gathered_rows(), options_.layout, options_.factor_dtype);
    if (gathered_flags_ != 0) return FollowUp(engine, progress);
  }
  bool add[2] = {false, false};
  for (FactorLayer::Part part : {FactorLayer::kWeight, FactorLayer::kBias}) {
    const uint32_t flag = part == FactorLayer::kWeight ? kFlagExtraWeight : kFlagExtraBias;
    if ((gathered_flags_ & flag) == 0) continue;
    Status status = layer_->RestoreExtra(part);
    if (!status.ok()) return status;
    add[part] = true;
  }
  Status status = layer_->Rebuild(gathered_, add);
  times_.rebuild_end = Clock::now();
  *progress = Progress::kDone;
  return status;
}

Status SfbExchange::FollowUp(Engine& engine, Progress* progress) {
  extra_in_flight_ = true;
  *progress = Progress::kPending;
  // All buffers first: a rank that enqueues one part and then fails would leave the others waiting for the second.
  struct Part {
    std::string name;
    Buffer buffer;
  };
  std::vector<Part> parts;
  for (FactorLayer::Part part : {FactorLayer::kWeight, FactorLayer::kBias}) {
    const uint32_t flag = part == FactorLayer::kWeight ? kFlagExtraWeight : kFlagExtraBias;
    if ((gathered_flags_ & flag) == 0) continue;
    Part entry{name() + (part == FactorLayer::kWeight ? ".extra.weight" : ".extra.bias"), {}};
    Status status = layer_->PrepareExtra(part, (local_flags_ & flag) != 0, &entry.buffer);
    if (!status.ok()) return status;
    parts.push_back(std::move(entry));
  }
  for (const Part& part : parts) {
    Status status = engine.transport().Allreduce(part.name, part.buffer, options_.extra_reduction, options_.process_set,
                                                 engine.CompletionOf(*this));
    if (!status.ok()) {
      engine.CancelCompletion(*this);
      return status;
    }
    ++wire_.collectives;
    wire_.bytes_sent += AllreduceWireBytes(part.buffer.elements(), part.buffer.dtype, options_.size);
  }
  return Status::OK();
}

}  // namespace poseidon
