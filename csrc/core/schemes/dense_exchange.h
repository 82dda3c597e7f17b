// A dense gradient, or a group of them, through the transport's allreduce.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/engine/exchange.h"

namespace poseidon {

// What a dense exchange needs from the owner of the gradient, or of several that lie side by side. Reused from step to
// step.
class DenseSource {
 public:
  virtual ~DenseSource() = default;

  // Training or autograd thread. The gradient itself where it is contiguous and travels as it is, else a copy. The
  // memory stays valid until the exchange ends.
  virtual Status PrepareWire(Buffer* wire) = 0;

  // True if the reduced copy must be brought back by RestoreFromWire (engine thread).
  virtual bool needs_restore() const = 0;
  virtual Status RestoreFromWire() = 0;

  // How many gradients travel in the buffer.
  virtual size_t gradients() const { return 1; }
  // Of the buffer, in this step: bytes that had to be copied into it.
  virtual int64_t copied_bytes() const { return 0; }
};

class DenseExchange final : public Exchange {
 public:
  struct Member {
    std::string wire_name;
    std::shared_ptr<DenseSource> source;
  };

  // One member is an ordinary allreduce; several are negotiated as a group, in this order on every rank. scheme: that
  // it is counted under.
  DenseExchange(std::string name, std::vector<Member> members, const Reduction& reduction, int process_set, int size,
                Scheme scheme = Scheme::kAllreduce);

  int64_t gradients() const override {
    size_t count = 0;
    for (const Member& member : members_) count += member.source->gradients();
    return static_cast<int64_t>(count);
  }

 protected:
  Status Begin(Engine& engine) override;
  Status Advance(Engine& engine, Progress* progress) override;
  bool cheap_advance() const override { return !restore_; }

 private:
  const std::vector<Member> members_;
  const Reduction reduction_;
  const int process_set_;
  const int size_;
  bool restore_ = false;  // some member needs it, this time
};

}  // namespace poseidon
