#include "core/engine/scalar_sum.h"

#include <cmath>
#include <memory>
#include <string>

namespace poseidon {

Status ScalarSum::Advance(Engine&, Progress* progress) {
  *progress = Progress::kDone;
  if (!std::isfinite(sum_)) {
    return Status::InvalidArgument(name() + ": the sum over ranks is " + std::to_string(sum_) +
                                   "; every rank must give a finite number");
  }
  return Status::OK();
}

Status SumOverRanks(Engine& engine, const std::string& name, int process_set, int size, double* value) {
  auto exchange = std::make_shared<ScalarSum>(name, process_set, size);
  exchange->SetValue(*value);
  Status status = engine.Submit(exchange);
  if (status.ok()) status = engine.Wait({exchange});
  if (status.ok()) *value = exchange->sum();
  return status;
}

}  // namespace poseidon
