// One gradient's communication, from the first enqueue to the result in place. An exchange may need several collectives
// in a row; the engine drives it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/base/status.h"
#include "core/engine/stats.h"
#include "core/schemes/scheme.h"
#include "core/transport/transport.h"

namespace poseidon {

class Engine;

class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(std::string name, Scheme scheme) : name_(std::move(name)), scheme_(scheme) {}
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // On the wire and in messages.
  const std::string& name() const { return name_; }
  Scheme scheme() const { return scheme_; }

  enum class State : uint8_t { kIdle, kInFlight, kDone, kFailed };
  // Acquire: kDone means that results and times are visible to the reader.
  State state() const { return state_.load(std::memory_order_acquire); }

  // Called whenever the exchange has ended, just before that becomes visible, on the thread that ended it, which may
  // hold the transport's locks unless all went well. Set while it is idle.
  void set_on_end(std::function<void(bool ok)> on_end) { on_end_ = std::move(on_end); }

  // Valid in kDone and kFailed.
  const Status& status() const { return status_; }
  const ExchangeTimes& times() const { return times_; }
  const WireCount& wire() const { return wire_; }
  // That it carries, where nothing else counts them.
  virtual int64_t gradients() const { return 0; }

 protected:
  friend class Engine;

  // Training or autograd thread, from Engine::Submit: enqueue the first collective(s), each with
  // engine.CompletionOf(*this). When it fails nothing may be left enqueued.
  virtual Status Begin(Engine& engine) = 0;

  enum class Progress { kPending, kDone };
  // After every collective enqueued so far has completed. Sets *progress to kPending if it enqueued more. When it
  // fails, the exchange ends after what it had enqueued by then. Runs on the engine thread, or on the transport's
  // thread when cheap_advance().
  virtual Status Advance(Engine& engine, Progress* progress) = 0;

  // True if Advance only marks: then a hop to the engine thread would cost more than the work.
  virtual bool cheap_advance() const { return false; }

  ExchangeTimes times_;
  WireCount wire_;

 private:
  const std::string name_;
  const Scheme scheme_;
  std::atomic<State> state_{State::kIdle};
  std::atomic<int> outstanding_{0};  // collectives enqueued and not completed
  std::function<void(bool ok)> on_end_;
  Status status_;  // written once, before state_ is released
  std::atomic<bool> failed_{
      false};  // a collective failed; the first message is kept in failure_ under the engine's mutex
  Status failure_;
  uint64_t began_ = 0;           // failures before it was admitted; under the engine's mutex, like the next two
  uint64_t failure_number_ = 0;  // which of all failed exchanges it was
  bool follows_ = false;         // it failed because of another failure
};

}  // namespace poseidon
