#include "core/gather_bytes.h"

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
      : Exchange(std::move(name), Scheme::kAllreduce), process_set_(process_set), block_(kLengthBytes + mine.size()) {
    const uint64_t length = mine.size();
    for (size_t i = 0; i < kLengthBytes; ++i) block_[i] = static_cast<uint8_t>(length >> (8 * i));
    if (!mine.empty()) std::memcpy(block_.data() + kLengthBytes, mine.data(), mine.size());
  }

  Status Split(std::vector<std::vector<uint8_t>>* by_rank) const {
    by_rank->clear();
    for (size_t at = 0; at < gathered_.size();) {
      if (gathered_.size() - at < kLengthBytes) return Corrupt();
      uint64_t length = 0;
      for (size_t i = 0; i < kLengthBytes; ++i) length |= uint64_t{gathered_[at + i]} << (8 * i);
      at += kLengthBytes;
      if (length > gathered_.size() - at) return Corrupt();
      by_rank->emplace_back(gathered_.begin() + at, gathered_.begin() + at + length);
      at += length;
    }
    return Status::OK();
  }

 protected:
  Status Begin(Engine& engine) override {
    const Buffer in{block_.data(), {static_cast<int64_t>(block_.size())}, DType::kUInt8};
    auto allocate = [self = std::static_pointer_cast<BytesExchange>(shared_from_this())](const std::vector<int64_t>& shape) {
      self->gathered_.resize(shape[0]);
      return Buffer{self->gathered_.data(), shape, DType::kUInt8};
    };
    Status status = engine.transport().Allgather(name(), in, engine.AllocatorOf(*this, in.dtype, "", std::move(allocate)),
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
  Status Corrupt() const { return Status::Internal("the gathered control message " + name() + " is damaged."); }

  const int process_set_;
  std::vector<uint8_t> block_;
  std::vector<uint8_t> gathered_;
};

}  // namespace

Status GatherBytes(Engine& engine, const std::string& name, int process_set, const std::vector<uint8_t>& mine,
                   std::vector<std::vector<uint8_t>>* by_rank) {
  auto exchange = std::make_shared<BytesExchange>(name, process_set, mine);
  Status status = engine.Submit(exchange);
  if (status.ok()) status = engine.Wait({exchange});
  return status.ok() ? exchange->Split(by_rank) : status;
}

}  // namespace poseidon
