#include "core/engine/gather_bytes.h"

#include <cstring>
#include <memory>
#include <utility>

namespace poseidon {

namespace {

// Each block starts with its own length, since the gathered buffer does not tell where a rank's block ends.
constexpr size_t kLengthBytes = sizeof(uint64_t);

class BytesExchange final : public Exchange {
 public:
  BytesExchange(std::string name, int process_set, const std::vector<uint8_t>& mine)
      : Exchange(std::move(name), Scheme::kAllreduce), process_set_(process_set), block_(FrameBlock(mine)) {}

  const std::vector<uint8_t>& gathered() const { return gathered_; }

 protected:
  Status Begin(Engine& engine) override {
    const Buffer in{block_.data(), {static_cast<int64_t>(block_.size())}, DType::kUInt8};
    auto allocate =
        [self = std::static_pointer_cast<BytesExchange>(shared_from_this())](const std::vector<int64_t>& shape) {
          self->gathered_.resize(shape[0]);
          return Buffer{self->gathered_.data(), shape, DType::kUInt8};
        };
    Status status =
        engine.transport().Allgather(name(), in, engine.AllocatorOf(*this, in.dtype, "", std::move(allocate)),
                                     process_set_, engine.CompletionOf(*this));
    if (!status.ok()) engine.CancelCompletion(*this);
    return status;
  }
  Status Advance(Engine&, Progress* progress) override {
    *progress = Progress::kDone;
    return Status::OK();
  }
  bool cheap_advance() const override { return true; }

 private:
  const int process_set_;
  std::vector<uint8_t> block_;
  std::vector<uint8_t> gathered_;
};

Status Damaged(const std::string& name, const std::string& how) {
  return Status::Internal("the gathered control message " + name + " is damaged: " + how + ".");
}

}  // namespace

std::vector<uint8_t> FrameBlock(const std::vector<uint8_t>& mine) {
  std::vector<uint8_t> block(kLengthBytes + mine.size());
  const uint64_t length = mine.size();
  for (size_t i = 0; i < kLengthBytes; ++i) block[i] = static_cast<uint8_t>(length >> (8 * i));
  if (!mine.empty()) std::memcpy(block.data() + kLengthBytes, mine.data(), mine.size());
  return block;
}

Status SplitBlocks(const std::vector<uint8_t>& gathered, int size, const std::string& name,
                   std::vector<std::vector<uint8_t>>* by_rank) {
  by_rank->clear();
  size_t at = 0;
  for (int rank = 0; rank < size; ++rank) {
    const std::string of_rank = "the block of rank " + std::to_string(rank) + " of " + std::to_string(size);
    if (gathered.size() - at < kLengthBytes) return Damaged(name, of_rank + " is missing");
    uint64_t length = 0;
    for (size_t i = 0; i < kLengthBytes; ++i) length |= uint64_t{gathered[at + i]} << (8 * i);
    at += kLengthBytes;
    if (length > gathered.size() - at) return Damaged(name, of_rank + " is cut");
    by_rank->emplace_back(gathered.begin() + at, gathered.begin() + at + length);
    at += length;
  }
  if (at == gathered.size()) return Status::OK();
  return Damaged(name, std::to_string(gathered.size() - at) + " bytes follow the blocks of all " +
                           std::to_string(size) + " ranks");
}

Status GatherBytes(Engine& engine, const std::string& name, int process_set, int size, const std::vector<uint8_t>& mine,
                   std::vector<std::vector<uint8_t>>* by_rank) {
  auto exchange = std::make_shared<BytesExchange>(name, process_set, mine);
  Status status = engine.Submit(exchange);
  if (status.ok()) status = engine.Wait({exchange});
  return status.ok() ? SplitBlocks(exchange->gathered(), size, name, by_rank) : status;
}

}  // namespace poseidon
