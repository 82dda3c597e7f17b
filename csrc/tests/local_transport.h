// An in-process Transport: ranks are threads that share one LocalCluster. As in Horovod, ranks may enqueue names in any
// order; an operation executes once every rank has enqueued its name; one thread executes operations one after another, in
// the order in which they became ready, and calls the completions of all ranks, rank 0 first. Ranks that group names
// differently wait for ever, as there.
//
// Only what the core uses: process set 0, sum and average of float32 and float64. The cluster must outlive the engines that
// hold its transports, and Shutdown() must precede the destruction of those engines, since an engine may not go away
// while a completion is running in it.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/engine.h"
#include "core/status.h"
#include "core/transport.h"

namespace poseidon {

class LocalCluster {
 public:
  // Each operation waits a random time of at most max_delay before it executes, to vary how threads interleave.
  explicit LocalCluster(int size, std::chrono::microseconds max_delay = {}) : size_(size), max_delay_(max_delay) {
    for (int rank = 0; rank < size; ++rank) transports_.push_back(std::make_unique<RankTransport>(this, rank));
    in_flight_.resize(size);
    executor_ = std::thread([this] { Run(); });
  }
  ~LocalCluster() { Shutdown(); }
  LocalCluster(const LocalCluster&) = delete;
  LocalCluster& operator=(const LocalCluster&) = delete;

  int size() const { return size_; }
  Transport* transport(int rank) { return transports_[rank].get(); }

  // The next operation of this name moves no data and completes with `failure` on all ranks.
  void FailNext(const std::string& name, Status failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    failures_[name] = std::move(failure);
  }

  // Names in the order in which they were executed, failed ones included; a group counts as its members.
  std::vector<std::string> executed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return executed_;
  }
  size_t operations() const { return executed().size(); }

  // Fails with kAborted what has not begun to execute, and every later enqueue. Idempotent; one thread at a time. No
  // completion runs any more when it returns.
  void Shutdown() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      shutdown_ = true;
    }
    work_.notify_all();
    if (executor_.joinable()) executor_.join();
  }

 private:
  enum class Kind { kAllreduce, kAllgather };

  // What one rank enqueued: a tensor, or a group of them.
  struct Request {
    Kind kind;
    std::vector<std::string> names;
    std::vector<Buffer> buffers;
    Reduction reduction;
    Allocator allocate;
    std::vector<Completion> done;
  };
  using Operation = std::vector<std::optional<Request>>;  // by rank

  class RankTransport final : public Transport {
   public:
    RankTransport(LocalCluster* cluster, int rank) : cluster_(cluster), rank_(rank) {}

    Status Allreduce(const std::string& name, const Buffer& in_out, const Reduction& reduction, int process_set,
                     Completion done) override {
      return GroupedAllreduce({name}, {in_out}, reduction, process_set, {std::move(done)});
    }
    Status GroupedAllreduce(const std::vector<std::string>& names, const std::vector<Buffer>& in_out,
                            const Reduction& reduction, int process_set, std::vector<Completion> done) override {
      return cluster_->Enqueue(rank_, process_set,
                               {Kind::kAllreduce, names, in_out, reduction, nullptr, std::move(done)});
    }
    Status Allgather(const std::string& name, const Buffer& in, Allocator allocate, int process_set,
                     Completion done) override {
      return cluster_->Enqueue(rank_, process_set,
                               {Kind::kAllgather, {name}, {in}, {}, std::move(allocate), {std::move(done)}});
    }

   private:
    LocalCluster* const cluster_;
    const int rank_;
  };

  Status Enqueue(int rank, int process_set, Request request) {
    if (process_set != 0) return Status::InvalidArgument("there is only process set 0");
    if (request.names.empty() || request.names.size() != request.buffers.size() ||
        request.names.size() != request.done.size()) {
      return Status::InvalidArgument("names, buffers and completions must be as many, and at least one");
    }
    std::string key;
    for (const std::string& name : request.names) key += name + '\n';
    std::lock_guard<std::mutex> lock(mutex_);
    if (shutdown_) return Status::Aborted("the transport has been shut down");
    for (const std::string& name : request.names) {
      if (in_flight_[rank].count(name) != 0) {
        return Status::InvalidArgument(name + " is already in flight on rank " + std::to_string(rank));
      }
    }
    in_flight_[rank].insert(request.names.begin(), request.names.end());
    Operation& operation = waiting_.try_emplace(key, Operation(size_)).first->second;
    operation[rank] = std::move(request);
    for (const auto& of_rank : operation) {
      if (!of_rank) return Status::OK();
    }
    ready_.push_back(std::move(operation));
    waiting_.erase(key);
    work_.notify_one();
    return Status::OK();
  }

  void Run() {
    pthread_setname_np(pthread_self(), "local-transport");
    std::minstd_rand random(1);
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return shutdown_ || !ready_.empty(); });
      if (shutdown_) break;
      Operation operation = std::move(ready_.front());
      ready_.pop_front();
      std::vector<Status> statuses;  // by name
      for (const std::string& name : operation[0]->names) {
        executed_.push_back(name);
        const auto failure = failures_.find(name);
        statuses.push_back(failure == failures_.end() ? Status::OK() : failure->second);
        if (failure != failures_.end()) failures_.erase(failure);
      }
      lock.unlock();
      if (max_delay_.count() > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % (max_delay_.count() + 1)));
      }
      for (size_t i = 0; i < statuses.size(); ++i) {
        if (statuses[i].ok()) statuses[i] = Execute(operation, i);
      }
      lock.lock();
      shutdown_ = shutdown_ || no_memory_;
      Forget(operation);  // first: a completion lets somebody enqueue the name again
      lock.unlock();
      Complete(operation, statuses);
      operation.clear();  // requests own exchanges, which must not be destroyed under the lock
      lock.lock();
    }
    // Under the lock, as Horovod does at its shutdown: so lock-order checkers see a completion that breaks its contract.
    for (auto& key_and_operation : waiting_) ready_.push_back(std::move(key_and_operation.second));
    for (Operation& operation : ready_) {
      Forget(operation);
      Complete(operation, {});
    }
    waiting_.clear();
    ready_.clear();
  }

  void Forget(const Operation& operation) {
    for (int rank = 0; rank < size_; ++rank) {
      if (!operation[rank]) continue;
      for (const std::string& name : operation[rank]->names) in_flight_[rank].erase(name);
    }
  }

  // No statuses: shut down.
  static void Complete(const Operation& operation, const std::vector<Status>& statuses) {
    for (const auto& request : operation) {
      if (!request) continue;
      for (size_t i = 0; i < request->done.size(); ++i) {
        request->done[i](statuses.empty() ? Status::Aborted("the transport has been shut down") : statuses[i]);
      }
    }
  }

  Status Execute(const Operation& operation, size_t i) {
    const Request& first = *operation[0];
    const std::string& name = first.names[i];
    for (const auto& request : operation) {
      if (request->kind != first.kind) return Status::InvalidArgument(name + ": ranks enqueued different operations");
      if (request->buffers[i].dtype != first.buffers[i].dtype) {
        return Status::InvalidArgument(name + ": ranks enqueued different dtypes");
      }
      std::vector<int64_t> shape = request->buffers[i].shape;
      if (first.kind == Kind::kAllgather) {
        if (shape.empty() || first.buffers[i].shape.empty()) {
          return Status::InvalidArgument(name + ": an allgather needs a first dimension");
        }
        shape[0] = first.buffers[i].shape[0];
      }
      if (shape != first.buffers[i].shape) return Status::InvalidArgument(name + ": ranks enqueued different shapes");
      if (request->reduction.op != first.reduction.op || request->reduction.prescale != first.reduction.prescale ||
          request->reduction.postscale != first.reduction.postscale) {
        return Status::InvalidArgument(name + ": ranks enqueued different reductions");
      }
    }
    if (first.kind == Kind::kAllgather) return Gather(operation);
    if (first.reduction.op != ReduceOp::kSum && first.reduction.op != ReduceOp::kAverage) {
      return Status::InvalidArgument(name + ": only sum and average are supported");
    }
    switch (first.buffers[i].dtype) {
      case DType::kFloat32: return Reduce<float>(operation, i);
      case DType::kFloat64: return Reduce<double>(operation, i);
      default: return Status::InvalidArgument(name + ": only float32 and float64 are supported");
    }
  }

  template <typename T>
  static Status Reduce(const Operation& operation, size_t i) {
    const Reduction& reduction = operation[0]->reduction;
    double postscale = reduction.postscale;
    if (reduction.op == ReduceOp::kAverage) postscale /= static_cast<double>(operation.size());
    for (int64_t element = 0; element < operation[0]->buffers[i].elements(); ++element) {
      T sum = 0;
      for (const auto& request : operation) {
        sum += static_cast<T>(reduction.prescale) * static_cast<const T*>(request->buffers[i].data)[element];
      }
      sum *= static_cast<T>(postscale);
      for (const auto& request : operation) static_cast<T*>(request->buffers[i].data)[element] = sum;
    }
    return Status::OK();
  }

  Status Gather(const Operation& operation) {
    std::vector<int64_t> shape = operation[0]->buffers[0].shape;
    shape[0] = 0;
    for (const auto& request : operation) shape[0] += request->buffers[0].shape[0];
    for (const auto& request : operation) {
      Buffer out;
      try {
        out = request->allocate(shape);
      } catch (const std::exception&) {
        no_memory_ = true;
        return Status::Unavailable("a peer has gone");
      }
      if (out.shape != shape || out.dtype != request->buffers[0].dtype) {
        return Status::Internal(request->names[0] + ": the allocator returned another shape or dtype");
      }
      auto* at = static_cast<unsigned char*>(out.data);
      for (const auto& source : operation) {
        const int64_t bytes = source->buffers[0].bytes();
        if (bytes == 0) continue;
        std::memcpy(at, source->buffers[0].data, bytes);
        at += bytes;
      }
    }
    return Status::OK();
  }

  const int size_;
  const std::chrono::microseconds max_delay_;
  bool no_memory_ = false;  // executor only: an allocator has thrown
  std::vector<std::unique_ptr<RankTransport>> transports_;  // constant after construction

  mutable std::mutex mutex_;
  std::condition_variable work_;                    // ready_ or shutdown_
  bool shutdown_ = false;                           // guarded by mutex_, like all that follow
  std::vector<std::set<std::string>> in_flight_;    // by rank
  std::map<std::string, Operation> waiting_;        // for ranks that have not enqueued it yet
  std::deque<Operation> ready_;
  std::map<std::string, Status> failures_;
  std::vector<std::string> executed_;

  std::thread executor_;
};

// A cluster with one engine per rank.
struct LocalWorld {
  explicit LocalWorld(int size, std::chrono::microseconds max_delay = {}) : cluster(size, max_delay) {
    for (int rank = 0; rank < size; ++rank) {
      engines.push_back(std::make_unique<Engine>(cluster.transport(rank), Engine::Options{}));
    }
  }
  ~LocalWorld() { cluster.Shutdown(); }

  LocalCluster cluster;
  std::vector<std::unique_ptr<Engine>> engines;  // by rank
};

// Runs `rank_main` once per rank, each on a thread of its own, and joins them.
inline void RunRanks(int size, const std::function<void(int rank)>& rank_main) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&rank_main, rank] {
      pthread_setname_np(pthread_self(), ("rank-" + std::to_string(rank)).c_str());
      rank_main(rank);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace poseidon
