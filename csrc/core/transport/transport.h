// Nonblocking collectives as the engine needs them. The real one is in csrc/horovod; C++ unit tests use one in which
// ranks are threads.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/status.h"

namespace poseidon {

// Dense, contiguous, host memory that somebody else owns.
struct Buffer {
  void* data = nullptr;
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;

  int64_t elements() const {
    int64_t n = 1;
    for (int64_t extent : shape) n *= extent;
    return n;
  }
  int64_t bytes() const { return elements() * SizeOf(dtype); }
};

// Values are those of hvd.Average, hvd.Sum, ...; Adasum (2) never passes through the engine.
enum class ReduceOp : int32_t { kAverage = 0, kSum = 1, kMin = 3, kMax = 4, kProduct = 5 };

struct Reduction {
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1.0;   // before the sum
  double postscale = 1.0;  // after it; an average is divided by the process set's size on top
};

// Called exactly once for an enqueue that returned OK, never for one that failed. Its status is kAborted where nothing
// is wrong but that the transport has shut down. Runs on the transport's thread, possibly under its locks: must not
// block, throw, or take any lock under which someone enqueues.
using Completion = std::function<void(const Status&)>;

// Called on the transport's thread when the extent of an allgather's result is known: negotiation is over and the
// transfer is about to start. The memory must stay valid until the completion. Throws where there is none. The other
// ranks then already wait for this one's part, which nothing can call off: so the transport completes the gather with a
// failure and shuts down on this rank, and all that is in flight there, or sent later, fails with kAborted.
using Allocator = std::function<Buffer(const std::vector<int64_t>& shape)>;

// What a transport can do and does. The defaults are those of one without limits that leaves messages alone.
struct Traits {
  int64_t max_elements = std::numeric_limits<int64_t>::max();  // of one collective, all ranks together
  bool (*reduces)(DType) = nullptr;                            // whether it can add up a dtype; null: every one
  double fusion_bytes = 0;      // up to which it puts together what is ready at the same time; 0: it does not
  bool device_buffers = false;  // whether Buffer::data may lie in a device's memory
  const char* who_knows_of_stalls = nullptr;  // that names the ranks which are missing; null: nobody

  bool Reduces(DType dtype) const { return reduces == nullptr || reduces(dtype); }
  // The dtype in which values of `dtype` are added up.
  DType ReducedAs(DType dtype) const { return Reduces(dtype) ? dtype : DType::kFloat32; }
};

// All calls may come from any thread. Buffers must stay valid until the completion. Every rank of the process set must
// enqueue the same names with the same operation, dtype and shape (an allgather's first extent may differ).
class Transport {
 public:
  virtual ~Transport() = default;

  // Always the same.
  virtual Traits traits() const { return {}; }
  // The same reduction, but made so that what has another number is not put into one message with it, as far as the
  // dtype allows.
  virtual Reduction KeepApart(const Reduction& reduction, DType, int /*number*/) const { return reduction; }

  virtual Status Allreduce(const std::string& name, const Buffer& in_out, const Reduction& reduction, int process_set,
                           Completion done) = 0;

  // Enqueues all or none; the members are negotiated together.
  virtual Status GroupedAllreduce(const std::vector<std::string>& names, const std::vector<Buffer>& in_out,
                                  const Reduction& reduction, int process_set, std::vector<Completion> done) = 0;

  // Concatenates along the first dimension in rank order. Zero rows are fine, on one rank or on all.
  virtual Status Allgather(const std::string& name, const Buffer& in, Allocator allocate, int process_set,
                           Completion done) = 0;
};

}  // namespace poseidon
