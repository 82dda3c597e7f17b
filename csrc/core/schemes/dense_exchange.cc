#include "core/schemes/dense_exchange.h"

#include <utility>

#include "core/engine/engine.h"
#include "core/model/cost_model.h"

namespace poseidon {

DenseExchange::DenseExchange(std::string name, std::vector<Member> members, const Reduction& reduction, int process_set,
                             int size, Scheme scheme)
    : Exchange(std::move(name), scheme),
      members_(std::move(members)),
      reduction_(reduction),
      process_set_(process_set),
      size_(size) {}

Status DenseExchange::Begin(Engine& engine) {
  restore_ = false;
  std::vector<Buffer> buffers(members_.size());
  for (size_t i = 0; i < members_.size(); ++i) {
    Status status = members_[i].source->PrepareWire(&buffers[i]);
    if (!status.ok()) return status;
    restore_ = restore_ || members_[i].source->needs_restore();
    wire_.bytes_sent += AllreduceWireBytes(buffers[i].elements(), buffers[i].dtype, size_);
  }
  wire_.collectives = static_cast<int64_t>(members_.size());
  wire_.dense_bytes = wire_.bytes_sent;

  if (members_.size() == 1) {
    Status status = engine.transport().Allreduce(members_[0].wire_name, buffers[0], reduction_, process_set_,
                                                 engine.CompletionOf(*this));
    if (!status.ok()) engine.CancelCompletion(*this);
    return status;
  }
  std::vector<std::string> names;
  std::vector<Completion> completions;
  for (const Member& member : members_) {
    names.push_back(member.wire_name);
    completions.push_back(engine.CompletionOf(*this));
  }
  Status status = engine.transport().GroupedAllreduce(names, buffers, reduction_, process_set_, std::move(completions));
  if (!status.ok()) {
    for (size_t i = 0; i < members_.size(); ++i) engine.CancelCompletion(*this);
  }
  return status;
}

Status DenseExchange::Advance(Engine&, Progress* progress) {
  *progress = Progress::kDone;
  if (!restore_) return Status::OK();
  for (const Member& member : members_) {
    if (!member.source->needs_restore()) continue;
    Status status = member.source->RestoreFromWire();
    if (!status.ok()) return status;
  }
  times_.rebuild_end = Clock::now();
  return Status::OK();
}

}  // namespace poseidon
