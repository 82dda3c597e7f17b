// The sum of one number per rank. Unlike a gather it works while ranks have joined (hvd.join()): the transport puts in
// zeros for them.
#pragma once

#include <string>
#include <utility>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/engine/exchange.h"

namespace poseidon {

class ScalarSum final : public Exchange {
 public:
  ScalarSum(std::string name, int process_set, int size)
      : Exchange(std::move(name), Scheme::kAllreduce), process_set_(process_set), size_(size) {}

  // This rank's part. While not in flight.
  void SetValue(double value) { sum_ = value; }
  // In kDone. The same on all ranks that took part.
  double sum() const { return sum_; }

 protected:
  Status Begin(Engine& engine) override;
  Status Advance(Engine& engine, Progress* progress) override;
  bool cheap_advance() const override { return true; }

 private:
  const int process_set_;
  const int size_;
  double sum_ = 0;
};

// Replaces *value by the sum over the ranks that call it with the same name. Blocks.
Status SumOverRanks(Engine& engine, const std::string& name, int process_set, int size, double* value);

}  // namespace poseidon
