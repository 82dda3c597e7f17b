#include "core/engine/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "core/base/bounds.h"

namespace poseidon {

namespace {

// After a breakdown: most exchanges are ended by the transport at once.
constexpr double kPatienceSeconds = 2;

// Transports do not always say which operation failed.
Status Named(const Status& status, const Exchange& exchange) {
  if (status.ok() || status.message().find(exchange.name()) != std::string::npos) return status;
  return Status(status.code(), exchange.name() + ": " + status.message());
}

// A deadline further away than that would overflow and lie in the past.
Clock::duration AtMostAsLongAsTheClockCounts(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(Bounded(seconds, 0, kMostSeconds)));
}

std::string SizeText(int64_t bytes) {
  if (bytes < 1000000) return std::to_string(bytes) + " bytes";
  const auto megabytes = static_cast<double>(bytes) * 1e-6;
  char text[32];
  if (megabytes < 1000) {
    std::snprintf(text, sizeof(text), "%.1f MB", megabytes);
  } else {
    std::snprintf(text, sizeof(text), "%.3f GB", megabytes * 1e-3);
  }
  return text;
}

std::string DescribePending(const std::vector<std::shared_ptr<Exchange>>& exchanges) {
  constexpr int kMostNames = 5;
  std::string names;
  int pending = 0;
  for (const auto& exchange : exchanges) {
    if (exchange->state() != Exchange::State::kInFlight) continue;
    if (pending++ < kMostNames) names += (names.empty() ? "" : ", ") + exchange->name();
  }
  if (pending > kMostNames) names += " and " + std::to_string(pending - kMostNames) + " more";
  return names;
}

}  // namespace

Engine::Engine(Transport* transport, Options options)
    : transport_(transport), options_(std::move(options)), pid_(getpid()), thread_([this] { Run(); }) {}

Engine::~Engine() { Stop(); }

void Engine::Stop() {
  if (getpid() != pid_) {  // forked: the thread stayed in the parent and joining it would never return
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  finished_.notify_all();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

Status Engine::Admit(const std::shared_ptr<Exchange>& exchange) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_)
      return Status::Aborted("poseidon_hvd's engine has been stopped; " + exchange->name() + " was not sent.");
    if (exchange->state() == Exchange::State::kInFlight) {
      return Status::Internal(exchange->name() + " was submitted while still in flight.");
    }
    exchange->began_ = first_failure_.count();
  }
  exchange->status_ = Status::OK();
  exchange->failure_ = Status::OK();
  exchange->failed_.store(false, std::memory_order_relaxed);
  exchange->wire_ = WireCount{};
  exchange->times_ = ExchangeTimes{};
  exchange->times_.enqueued = Clock::now();
  // One more than there are collectives, so that none of their completions can end it while Begin still runs.
  exchange->outstanding_.store(1, std::memory_order_relaxed);
  exchange->state_.store(Exchange::State::kInFlight, std::memory_order_release);
  return Status::OK();
}

Status Engine::Begin(const std::shared_ptr<Exchange>& exchange) {
  const Status status = exchange->Begin(*this);
  if (status.ok()) {
    OnCollectiveDone(exchange, Status::OK());
    return status;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return Named(first_failure_.Explain(exchange->name(), status), *exchange);
}

Status Engine::Submit(const std::shared_ptr<Exchange>& exchange) {
  Status status = Admit(exchange);
  if (!status.ok()) return status;
  const auto back_to_idle = [&] {
    exchange->outstanding_.store(0, std::memory_order_relaxed);
    exchange->state_.store(Exchange::State::kIdle, std::memory_order_release);
  };
  try {
    status = Begin(exchange);
  } catch (...) {  // the user's own code, such as a compressor
    back_to_idle();
    throw;
  }
  if (!status.ok()) back_to_idle();
  return status;
}

void Engine::Start(const std::shared_ptr<Exchange>& exchange) {
  exchange->times_.enqueued = Clock::now();
  const Status status = Begin(exchange);
  if (!status.ok()) Fail(exchange, status);
}

void Engine::Fail(const std::shared_ptr<Exchange>& exchange, const Status& status) {
  exchange->outstanding_.store(0, std::memory_order_relaxed);
  Finish(*exchange, status);
}

Completion Engine::CompletionOf(Exchange& exchange) {
  exchange.outstanding_.fetch_add(1, std::memory_order_relaxed);
  return [this, self = exchange.shared_from_this()](const Status& status) { OnCollectiveDone(self, status); };
}

void Engine::CancelCompletion(Exchange& exchange) { exchange.outstanding_.fetch_sub(1, std::memory_order_relaxed); }

Allocator Engine::AllocatorOf(Exchange& exchange, DType dtype, std::string remedy, Allocator allocate) {
  return [this, self = exchange.shared_from_this(), dtype, remedy = std::move(remedy),
          allocate = std::move(allocate)](const std::vector<int64_t>& shape) {
    try {
      return allocate(shape);
    } catch (const std::exception& error) {
      const Buffer wanted{nullptr, shape, dtype};
      throw std::runtime_error(CannotAllocate(*self, wanted, remedy, error.what()));
    }
  };
}

std::string Engine::CannotAllocate(Exchange& exchange, const Buffer& wanted, const std::string& remedy,
                                   const char* reason) {
  const std::string first_line(reason, std::strcspn(reason, "\n"));
  std::string text = "out of memory: " + std::to_string(wanted.shape[0]) + " gathered rows take " +
                     SizeText(wanted.bytes()) + " (" + first_line + ").";
  if (!remedy.empty()) text += " " + remedy;
  const Status status = Named(Status::OutOfMemory(std::move(text)), exchange);
  if (options_.log_warning) options_.log_warning(status.message());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!exchange.failed_.exchange(true)) exchange.failure_ = status;
    first_failure_.NoteBreakdown(status);
  }
  finished_.notify_all();
  return status.message();
}

void Engine::OnCollectiveDone(const std::shared_ptr<Exchange>& exchange, const Status& status) {
  if (!status.ok()) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!exchange->failed_.exchange(true)) exchange->failure_ = status;
  }
  if (exchange->outstanding_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  exchange->times_.wire_end = Clock::now();
  if (exchange->failed_.load(std::memory_order_acquire)) {
    Finish(*exchange, exchange->failure_);
  } else if (exchange->cheap_advance()) {
    Advance(exchange);
  } else {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ready_.push_back(exchange);
    }
    work_.notify_one();
  }
}

void Engine::Advance(const std::shared_ptr<Exchange>& exchange) {
  Exchange::Progress progress = Exchange::Progress::kDone;
  exchange->outstanding_.store(1, std::memory_order_relaxed);  // as in Submit
  Status status;
  try {
    status = exchange->Advance(*this, &progress);
  } catch (const std::exception& error) {  // no memory, as a rule; out of this thread it would end the process
    status = Status::Internal(exchange->name() + ": " + error.what());
  }
  if (status.ok() && progress == Exchange::Progress::kDone) {
    exchange->outstanding_.store(0, std::memory_order_relaxed);
    Finish(*exchange, std::move(status));
  } else {
    OnCollectiveDone(exchange, status);  // a failure too: what Advance had enqueued before it still uses the buffers
  }
}

void Engine::Finish(Exchange& exchange, Status status) {
  const bool ok = status.ok();
  exchange.times_.done = Clock::now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    exchange.status_ = Named(first_failure_.Explain(exchange.name(), status), exchange);
    if (ok) {
      first_failure_.NoteSuccess(exchange.began_);
    } else {
      exchange.follows_ = status.code() == StatusCode::kAborted;
      exchange.failure_number_ = ++failed_exchanges_;
      if (!exchange.follows_) first_failure_.Note(exchange.status_);
    }
  }
  if (exchange.on_end_) exchange.on_end_(ok);
  bool wake;
  {
    // Under the mutex, or a waiter could test the state, miss this change and sleep through the notification.
    std::lock_guard<std::mutex> lock(mutex_);
    exchange.state_.store(ok ? Exchange::State::kDone : Exchange::State::kFailed, std::memory_order_release);
    wake = waiters_ > 0;
  }
  if (wake) finished_.notify_all();
}

void Engine::Run() {
  pthread_setname_np(pthread_self(), "poseidon-engine");
  while (true) {
    std::shared_ptr<Exchange> exchange;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [this] { return stopping_ || !ready_.empty(); });
      if (stopping_) return;
      exchange = std::move(ready_.front());
      ready_.pop_front();
    }
    exchange->times_.rebuild_begin = Clock::now();
    Advance(exchange);
  }
}

bool Engine::WaitFor(const std::vector<std::shared_ptr<Exchange>>& exchanges, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiters_;
  const bool ended = finished_.wait_for(lock, AtMostAsLongAsTheClockCounts(seconds), [&] {
    return std::all_of(exchanges.begin(), exchanges.end(),
                       [](const auto& e) { return e->state() != Exchange::State::kInFlight; });
  });
  --waiters_;
  return ended;
}

Status Engine::Wait(const std::vector<std::shared_ptr<Exchange>>& exchanges, double* waited_seconds) {
  const Clock::duration warn_every = AtMostAsLongAsTheClockCounts(options_.stall_warning_seconds);
  std::vector<const Exchange*> open;
  for (const auto& exchange : exchanges) {
    if (exchange->state() == Exchange::State::kInFlight) open.push_back(exchange.get());
  }
  Clock::time_point since = Clock::now();
  Clock::time_point warn_at = since + warn_every;
  while (!open.empty()) {
    bool stopped = false;
    bool stalled = false;
    bool lost = false;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      ++waiters_;
      const auto in_breakdown = [this](const Exchange* e) { return first_failure_.LostInBreakdown(e->began_); };
      const auto progressed = [&] {
        lost = std::any_of(open.begin(), open.end(), in_breakdown);
        return stopping_ || lost || std::any_of(open.begin(), open.end(), [](const Exchange* e) {
                 return e->state() != Exchange::State::kInFlight;
               });
      };
      if (options_.stall_warning_seconds > 0) {
        stalled = !finished_.wait_until(lock, warn_at, progressed);
      } else {
        finished_.wait(lock, progressed);
      }
      --waiters_;
      stopped = stopping_;
    }
    const Clock::time_point now = Clock::now();
    const Exchange* ended = nullptr;
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](const Exchange* e) {
                                if (e->state() == Exchange::State::kInFlight) return false;
                                ended = e;
                                return true;
                              }),
               open.end());
    if (ended != nullptr && waited_seconds != nullptr) {
      waited_seconds[ended->scheme().place()] += SecondsBetween(since, now);
      since = now;
    }
    if (stopped && !open.empty()) {
      return Status::Aborted("poseidon_hvd's engine was stopped while waiting for " + DescribePending(exchanges) + ".");
    }
    if (lost) {
      WaitFor(exchanges, kPatienceSeconds);
      break;
    }
    if (stalled) {
      if (options_.log_warning) {
        const char* knows = transport_->traits().who_knows_of_stalls;
        options_.log_warning("still waiting for " + DescribePending(exchanges) +
                             ". Either a rank has not sent them yet, or it has failed" +
                             (knows != nullptr ? std::string("; ") + knows + " names the missing ranks." : "."));
      }
      warn_at = now + warn_every;
    }
  }
  return Verdict(exchanges);
}

void Engine::ForgetFailures() {
  std::lock_guard<std::mutex> lock(mutex_);
  first_failure_.Forget();
}

Status Engine::Verdict(const std::vector<std::shared_ptr<Exchange>>& exchanges) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Exchange* first = nullptr;
  bool lost = false;
  for (const auto& exchange : exchanges) {
    lost = lost || exchange->state() == Exchange::State::kInFlight;
    if (exchange->state() != Exchange::State::kFailed) continue;
    // What follows from another failure may have ended before it.
    const auto key = [](const Exchange& e) { return std::make_pair(e.follows_, e.failure_number_); };
    if (first == nullptr || key(*exchange) < key(*first)) first = exchange.get();
  }
  if (first != nullptr) return first->status();
  return lost ? first_failure_.first() : Status::OK();
}

}  // namespace poseidon
