// The background engine: takes exchanges whose collectives have completed and advances them to their end, in completion
// order, while the training thread computes and the transport moves the next ones.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/base/status.h"
#include "core/engine/exchange.h"
#include "core/engine/first_failure.h"
#include "core/transport/transport.h"

namespace poseidon {

class Engine {
 public:
  struct Options {
    double stall_warning_seconds = 60;                    // how long a wait stays silent; 0, less, NaN: for ever
    std::function<void(const std::string&)> log_warning;  // any thread; empty: dropped
  };

  // The transport must outlive every completion it still owes, which in practice means: leak both (see
  // architecture.md).
  Engine(Transport* transport, Options options);
  ~Engine();  // Stop()
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Begins an exchange that is not in flight. Any thread. On failure the exchange stays as it was.
  Status Submit(const std::shared_ptr<Exchange>& exchange);

  // Submit in two parts, for what has to wait for its turn. An admitted exchange counts as in flight; it must be
  // started, or failed, which ends it. A failure to start ends it too.
  Status Admit(const std::shared_ptr<Exchange>& exchange);
  void Start(const std::shared_ptr<Exchange>& exchange);
  void Fail(const std::shared_ptr<Exchange>& exchange, const Status& status);

  // For Exchange::Begin and Advance: counts one more outstanding collective and returns its completion. A completion
  // that is not handed to the transport after all must be given back with CancelCompletion.
  Completion CompletionOf(Exchange& exchange);
  void CancelCompletion(Exchange& exchange);

  // For Exchange::Begin too: an allocator that reports what it cannot allocate, at once and by name, since the wait may
  // not return soon. The transport shuts down after that (transport.h). `remedy` tells the user what to do.
  Allocator AllocatorOf(Exchange& exchange, DType dtype, std::string remedy, Allocator allocate);

  // Blocks until all are done or failed; returns the failure that came first, after ALL have ended, so that no buffer
  // is still in use. Only where an allocation has failed on this rank some may be left in flight, with their buffers:
  // nobody can tell when they end. Any thread but the engine's; the caller must not hold Python's lock. waited_seconds,
  // if given, has SchemeCount() elements, by place, and is increased by the time spent waiting for it.
  Status Wait(const std::vector<std::shared_ptr<Exchange>>& exchanges, double* waited_seconds = nullptr);

  // The same for at most `seconds`, and without a verdict: true if all have ended.
  bool WaitFor(const std::vector<std::shared_ptr<Exchange>>& exchanges, double seconds);

  // The transport has been started anew: what fails from now on has nothing to do with what failed before.
  void ForgetFailures();

  // Ends the thread; exchanges still in flight fail with kAborted, also later ones. Idempotent; waits for the exchange
  // being advanced. In a forked child, where the thread does not exist, it only lets go of it. Not for several threads
  // at once.
  void Stop();

  Transport& transport() { return *transport_; }

 private:
  Status Begin(const std::shared_ptr<Exchange>& exchange);
  void Run();
  void OnCollectiveDone(const std::shared_ptr<Exchange>& exchange, const Status& status);
  void Advance(const std::shared_ptr<Exchange>& exchange);
  void Finish(Exchange& exchange, Status status);
  Status Verdict(const std::vector<std::shared_ptr<Exchange>>& exchanges);
  // Returns what it has told.
  std::string CannotAllocate(Exchange& exchange, const Buffer& wanted, const std::string& remedy, const char* reason);

  Transport* const transport_;
  const Options options_;
  const pid_t pid_;

  // mutex_ is a leaf: nothing is called while it is held.
  std::mutex mutex_;
  std::condition_variable work_;                 // ready_ or stopping_
  std::condition_variable finished_;             // an exchange ended
  std::deque<std::shared_ptr<Exchange>> ready_;  // guarded by mutex_
  bool stopping_ = false;                        // guarded by mutex_
  int waiters_ = 0;                              // guarded by mutex_
  FirstFailure first_failure_;                   // guarded by mutex_
  uint64_t failed_exchanges_ = 0;                // guarded by mutex_

  std::thread thread_;  // last: starts in the constructor
};

}  // namespace poseidon
