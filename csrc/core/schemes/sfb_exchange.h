// Sufficient factor broadcasting of one fully connected layer (Poseidon, arXiv 1706.03292, section 3.2): one allgather
// of the rows [x | d | flag], then G = scale * d_all^T x_all on every rank. The same exchange carries the touched rows
// of an embedding table, whose x is one-hot and travels as an id (factor_layout.h).
//
// Where some rank flagged a gradient that its factors do not cover, all ranks follow up with an allreduce of that extra
// part and the rebuilt gradient is added to its result. Every rank reads the flags from the same gathered matrix, so
// all follow up or none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/engine/exchange.h"
#include "core/schemes/factor_layout.h"

namespace poseidon {

// What the exchange needs from the owner of the layer (csrc/torch; plain loops in the unit tests). Reused from step to
// step.
class FactorLayer {
 public:
  enum Part : int { kWeight = 0, kBias = 1 };

  virtual ~FactorLayer() = default;

  // Transport thread. Memory for the gathered rows; stays valid until the exchange ends.
  virtual Buffer AllocateGathered(const std::vector<int64_t>& shape) = 0;

  // Engine thread. Weight gradient = scale * d^T x over the gathered rows, bias gradient = scale * column sums of d,
  // each overwriting the gradient buffer, or added to it where `add`. No rows: zeros, or nothing to add.
  virtual Status Rebuild(const Buffer& gathered, const bool add[2]) = 0;

  // Engine thread. The wire buffer for the extra part: this rank's own, or zeros where it has none.
  virtual Status PrepareExtra(Part part, bool has_extra, Buffer* wire) = 0;

  // Engine thread. Puts the reduced extra part into the gradient buffer, to which Rebuild then adds.
  virtual Status RestoreExtra(Part part) = 0;

  virtual bool has_bias() const = 0;
};

class SfbExchange final : public Exchange {
 public:
  struct Options {
    Scheme scheme = Scheme::kSfb;  // or kRowSparse
    std::string parameter;         // in messages
    FactorLayout layout;
    DType factor_dtype = DType::kFloat32;  // on the wire
    Reduction extra_reduction;             // of the extra part: the same as for a dense gradient
    int process_set = 0;
    int size = 1;
    double dense_bytes = 0;  // what an allreduce of weight and bias gradient would send
  };

  SfbExchange(std::string name, std::shared_ptr<FactorLayer> layer, const Options& options);

  // Before Submit. `message` holds MessageRows(rows, flags) rows whose flag column is written; it stays valid until the
  // exchange ends. `flags` are this rank's own.
  void SetMessage(const Buffer& message, uint32_t flags, double pack_seconds);

  // Valid when done: the OR of all ranks' flags, the same on every rank.
  uint32_t gathered_flags() const { return gathered_flags_; }
  int64_t gathered_rows() const { return gathered_.shape.empty() ? 0 : gathered_.shape[0]; }

 protected:
  Status Begin(Engine& engine) override;
  Status Advance(Engine& engine, Progress* progress) override;

 private:
  Status FollowUp(Engine& engine, Progress* progress);

  const std::shared_ptr<FactorLayer> layer_;
  const Options options_;
  Buffer message_;
  uint32_t local_flags_ = 0;
  double pack_seconds_ = 0;
  Buffer gathered_;
  uint32_t gathered_flags_ = 0;
  bool extra_in_flight_ = false;
};

}  // namespace poseidon
