// One allreduce of a few numbers that the exchange itself holds, summed over ranks. Unlike a gather it works while
// ranks have joined (hvd.join()): the transport puts in zeros for them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/engine/exchange.h"

namespace poseidon {

class SumExchange : public Exchange {
 protected:
  // numbers: of the class derived from this, which lives as long.
  SumExchange(std::string name, int process_set, int size, double* numbers, int64_t count)
      : Exchange(std::move(name), Scheme::kAllreduce),
        size_(size),
        process_set_(process_set),
        numbers_(numbers),
        count_(count) {}

  Status Begin(Engine& engine) override;
  Status Advance(Engine&, Progress* progress) override {
    *progress = Progress::kDone;
    return Status::OK();
  }
  bool cheap_advance() const override { return true; }

  const int size_;

 private:
  const int process_set_;
  double* const numbers_;
  const int64_t count_;
};

}  // namespace poseidon
