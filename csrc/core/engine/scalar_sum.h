// The sum of one number per rank. Unlike a gather it works while ranks have joined (hvd.join()): the transport puts in
// zeros for them.
#pragma once

#include <string>
#include <utility>

#include "core/engine/sum_exchange.h"

namespace poseidon {

class ScalarSum final : public SumExchange {
 public:
  ScalarSum(std::string name, int process_set, int size) : SumExchange(std::move(name), process_set, size, &sum_, 1) {}

  // This rank's part. While not in flight.
  void SetValue(double value) { sum_ = value; }
  // In kDone. The same on all ranks that took part.
  double sum() const { return sum_; }

 protected:
  Status Advance(Engine& engine, Progress* progress) override;

 private:
  double sum_ = 0;
};

// Replaces *value by the sum over the ranks that call it with the same name. Blocks.
Status SumOverRanks(Engine& engine, const std::string& name, int process_set, int size, double* value);

}  // namespace poseidon
