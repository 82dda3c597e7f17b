// Do all ranks have the same set of something, such as parameters that want a gradient? One allreduce of three numbers.
// Unlike a gather it works while ranks have joined (hvd.join()): the transport puts in zeros for them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "core/engine/sum_exchange.h"

namespace poseidon {

class Census final : public SumExchange {
 public:
  Census(std::string name, int process_set, int size)
      : SumExchange(std::move(name), process_set, size, ranks_and_sums_, 3) {}

  // This rank's set, by a hash. While not in flight.
  void SetHash(uint64_t hash);

  // In kDone, the same on all ranks that took part. Some of them hold different sets.
  bool differs() const { return ranks_and_sums_[0] * ranks_and_sums_[2] != ranks_and_sums_[1] * ranks_and_sums_[1]; }
  // No rank was in hvd.join().
  bool complete() const { return ranks_and_sums_[0] == size_; }

 private:
  // One, a number made of the hash, and its square. Ranks times the sum of squares is the square of the sum if and only
  // if all numbers are equal.
  double ranks_and_sums_[3] = {};
};

}  // namespace poseidon
