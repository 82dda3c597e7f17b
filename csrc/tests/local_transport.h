// An in-process Transport: ranks are threads that share one LocalCluster. As in Horovod, ranks may enqueue names in any
// order; an operation executes once every rank has enqueued its name; one thread executes operations one after another,
// in the order in which they became ready, and calls the completions of all ranks, rank 0 first. Ranks that group names
// differently wait for ever, as there.
//
// It takes the types and operations that csrc/horovod takes. The cluster must outlive the engines that hold its
// transports, and Shutdown() must precede the destruction of those engines, since an engine may not go away while a
// completion is running in it.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/transport/transport.h"
#include "horovod/traits.h"
#include "tests/local_reduce.h"

namespace poseidon {

class LocalCluster {
 public:
  static constexpr int kAllRanks = -1;

  struct Executed {
    std::string name;
    const char* kind;
    DType dtype;
    std::vector<int64_t> bytes;  // by member of the process set: what it sent
    int process_set;
    bool ok;
  };
  struct Waiting {
    std::vector<std::string> names;  // several: a group
    int process_set;
    std::vector<int> missing;  // ranks that have not enqueued it
  };

  // Each operation waits a random time of at most max_delay before it executes, to vary how threads interleave.
  explicit LocalCluster(int size, std::chrono::microseconds max_delay = {}, unsigned seed = 1)
      : size_(size), max_delay_(max_delay), seed_(seed) {
    for (int rank = 0; rank < size; ++rank) transports_.push_back(std::make_unique<RankTransport>(this, rank));
    in_flight_.resize(size);
    std::vector<int> all(size);
    std::iota(all.begin(), all.end(), 0);
    process_sets_.push_back(std::move(all));
    executor_ = std::thread([this] { Run(); });
  }
  ~LocalCluster() { Shutdown(); }
  LocalCluster(const LocalCluster&) = delete;
  LocalCluster& operator=(const LocalCluster&) = delete;

  int size() const { return size_; }
  Transport* transport(int rank) { return transports_[rank].get(); }

  // Ranks in ascending order. Returns the number by which operations name them; 0 is the set of all.
  int AddProcessSet(std::vector<int> ranks) {
    std::lock_guard<std::mutex> lock(mutex_);
    process_sets_.push_back(std::move(ranks));
    return static_cast<int>(process_sets_.size()) - 1;
  }

  // The next operation of this name, or the next of any name if it is empty, completes with `failure` on that rank. For
  // all ranks it moves no data either.
  void FailNext(const std::string& name, Status failure, int rank = kAllRanks) {
    std::lock_guard<std::mutex> lock(mutex_);
    failures_[name] = {std::move(failure), rank};
  }

  // In the order of execution, failed ones included; a group counts as its members.
  std::vector<Executed> log() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return executed_;
  }
  std::vector<std::string> executed() const {
    std::vector<std::string> names;
    for (const Executed& operation : log()) names.push_back(operation.name);
    return names;
  }
  size_t operations() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return executed_.size();
  }

  // Operations that some of their ranks have not enqueued yet.
  std::vector<Waiting> waiting() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Waiting> result;
    for (const auto& [key, operation] : waiting_) {
      Waiting waiting{{}, key.first, {}};
      const std::vector<int>& members = process_sets_[key.first];
      for (size_t i = 0; i < members.size(); ++i) {
        if (!operation[i]) waiting.missing.push_back(members[i]);
        if (operation[i]) waiting.names = operation[i]->names;
      }
      result.push_back(std::move(waiting));
    }
    return result;
  }

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
  using Operation = std::vector<std::optional<Request>>;  // by member of the process set
  using Key = std::pair<int, std::string>;                // process set, names
  struct Failure {
    Status status;
    int rank;
  };

  class RankTransport final : public Transport {
   public:
    Traits traits() const override { return HorovodTraits(); }
    Reduction KeepApart(const Reduction& reduction, DType dtype, int number) const override {
      return HorovodKeepApart(reduction, dtype, number);
    }

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
    if (request.names.empty() || request.names.size() != request.buffers.size() ||
        request.names.size() != request.done.size()) {
      return Status::InvalidArgument("names, buffers and completions must be as many, and at least one");
    }
    std::string names;
    for (size_t i = 0; i < request.names.size(); ++i) {
      names += request.names[i] + '\n';
      const DType dtype = request.buffers[i].dtype;
      if (dtype == DType::kOther || (request.kind == Kind::kAllreduce && !CanReduce(dtype))) {
        return Status::InvalidArgument(request.names[i] + ": Horovod cannot send " + Name(dtype) + ".");
      }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (shutdown_) return Status::Aborted("the transport has been shut down");
    if (process_set < 0 || process_set >= static_cast<int>(process_sets_.size())) {
      return Status::InvalidArgument("there is no process set " + std::to_string(process_set));
    }
    const std::vector<int>& members = process_sets_[process_set];
    const size_t member = std::find(members.begin(), members.end(), rank) - members.begin();
    if (member == members.size()) {
      return Status::InvalidArgument("rank " + std::to_string(rank) + " is not in process set " +
                                     std::to_string(process_set));
    }
    for (const std::string& name : request.names) {
      if (in_flight_[rank].count({process_set, name}) != 0) {
        return Status::InvalidArgument(name + " is already in flight on rank " + std::to_string(rank));
      }
    }
    for (const std::string& name : request.names) in_flight_[rank].insert({process_set, name});
    const Key key{process_set, std::move(names)};
    Operation& operation = waiting_.try_emplace(key, Operation(members.size())).first->second;
    operation[member] = std::move(request);
    for (const auto& of_member : operation) {
      if (!of_member) return Status::OK();
    }
    ready_.emplace_back(process_set, std::move(operation));
    waiting_.erase(key);
    work_.notify_one();
    return Status::OK();
  }

  void Run() {
    pthread_setname_np(pthread_self(), "local-transport");
    std::minstd_rand random(seed_);
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return shutdown_ || !ready_.empty(); });
      if (shutdown_) break;
      const int process_set = ready_.front().first;
      Operation operation = std::move(ready_.front().second);
      ready_.pop_front();
      std::vector<Failure> failures;  // by name
      for (const std::string& name : operation[0]->names) failures.push_back(TakeFailure(name));
      lock.unlock();
      if (max_delay_.count() > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % (max_delay_.count() + 1)));
      }
      std::vector<Status> statuses;  // by name
      for (size_t i = 0; i < failures.size(); ++i) {
        const bool fails_everywhere = !failures[i].status.ok() && failures[i].rank == kAllRanks;
        statuses.push_back(fails_everywhere ? failures[i].status : Execute(operation, i));
      }
      lock.lock();
      shutdown_ = shutdown_ || no_memory_;
      for (size_t i = 0; i < statuses.size(); ++i) {
        Record(operation, i, process_set, statuses[i].ok() && failures[i].status.ok());
      }
      Forget(process_set, operation);  // first: a completion lets somebody enqueue the name again
      const std::vector<int> members = process_sets_[process_set];
      lock.unlock();
      for (size_t member = 0; member < members.size(); ++member) {
        for (size_t i = 0; i < statuses.size(); ++i) {
          operation[member]->done[i](failures[i].rank == members[member] ? failures[i].status : statuses[i]);
        }
      }
      operation.clear();  // requests own exchanges, which must not be destroyed under the lock
      lock.lock();
    }
    // Under the lock, as Horovod does at its shutdown: so lock-order checkers see a completion that breaks its
    // contract.
    for (auto& [key, operation] : waiting_) ready_.emplace_back(key.first, std::move(operation));
    for (auto& [process_set, operation] : ready_) {
      Forget(process_set, operation);
      for (const auto& request : operation) {
        if (!request) continue;
        for (const Completion& done : request->done) done(Status::Aborted("the transport has been shut down"));
      }
    }
    waiting_.clear();
    ready_.clear();
  }

  // These three under mutex_.
  Failure TakeFailure(const std::string& name) {
    for (const std::string& key : {name, std::string()}) {
      const auto found = failures_.find(key);
      if (found == failures_.end()) continue;
      Failure failure = std::move(found->second);
      failures_.erase(found);
      return failure;
    }
    return {Status::OK(), kAllRanks};
  }
  void Record(const Operation& operation, size_t i, int process_set, bool ok) {
    const Request& first = *operation[0];
    const char* kind = first.kind == Kind::kAllreduce ? "allreduce" : "allgather";
    Executed executed{first.names[i], kind, first.buffers[i].dtype, {}, process_set, ok};
    for (const auto& request : operation) executed.bytes.push_back(request->buffers[i].bytes());
    executed_.push_back(std::move(executed));
  }
  void Forget(int process_set, const Operation& operation) {
    for (size_t member = 0; member < operation.size(); ++member) {
      if (!operation[member]) continue;
      const int rank = process_sets_[process_set][member];
      for (const std::string& name : operation[member]->names) in_flight_[rank].erase({process_set, name});
    }
  }

  Status Execute(const Operation& operation, size_t i) {
    const Request& first = *operation[0];
    const std::string& name = first.names[i];
    std::vector<Buffer> buffers;
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
      buffers.push_back(request->buffers[i]);
    }
    return first.kind == Kind::kAllgather ? Gather(operation) : ReduceInPlace(name, buffers, first.reduction);
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
  const unsigned seed_;
  bool no_memory_ = false;                                  // executor only: an allocator has thrown
  std::vector<std::unique_ptr<RankTransport>> transports_;  // constant after construction

  mutable std::mutex mutex_;
  std::condition_variable work_;                                  // ready_ or shutdown_
  bool shutdown_ = false;                                         // guarded by mutex_, like all that follow
  std::vector<std::vector<int>> process_sets_;                    // their ranks
  std::vector<std::set<std::pair<int, std::string>>> in_flight_;  // by rank: process set, name
  std::map<Key, Operation> waiting_;                              // for ranks that have not enqueued it yet
  std::deque<std::pair<int, Operation>> ready_;
  std::map<std::string, Failure> failures_;
  std::vector<Executed> executed_;

  std::thread executor_;
};

// A cluster with one engine per rank.
struct LocalWorld {
  explicit LocalWorld(int size, std::chrono::microseconds max_delay = {}, unsigned seed = 1)
      : cluster(size, max_delay, seed) {
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
