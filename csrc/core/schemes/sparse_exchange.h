// A sparse gradient as Horovod exchanges it: an allgather of its indices and one of its values, without merging.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/engine/exchange.h"

namespace poseidon {

class SparseExchange final : public Exchange {
 public:
  // Transport thread. Memory for what is gathered; stays valid until the exchange ends.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual Buffer AllocateIndices(const std::vector<int64_t>& shape) = 0;
    virtual Buffer AllocateValues(const std::vector<int64_t>& shape) = 0;
  };

  // parameter: in messages.
  SparseExchange(std::string name, std::string parameter, std::shared_ptr<Receiver> receiver, int process_set,
                 int size);

  // Before Submit: one row per entry in both. They stay valid until the exchange ends.
  void SetMessage(const Buffer& indices, const Buffer& values);

  int64_t gradients() const override { return 1; }

 protected:
  Status Begin(Engine& engine) override;
  Status Advance(Engine& engine, Progress* progress) override;
  bool cheap_advance() const override { return true; }

 private:
  Status Gather(Engine& engine, const char* what, const Buffer& mine, Allocator allocate);

  const std::string parameter_;
  const std::shared_ptr<Receiver> receiver_;
  const int process_set_;
  const int size_;
  Buffer indices_;
  Buffer values_;
  int64_t gathered_bytes_ = 0;
  Status second_;  // of the second enqueue; told when the first gather has ended
};

}  // namespace poseidon
