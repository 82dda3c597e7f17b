// A parameter's gradient that travels in several messages, so that others can overtake it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/schemes/dense_exchange.h"
#include "torch/routes/grad_source.h"

namespace poseidon {

class GradParts : public std::enable_shared_from_this<GradParts> {
 public:
  GradParts(std::shared_ptr<GradSource> source, int parts) : source_(std::move(source)), parts_(parts) {}

  // The gradient is complete. Before any part is sent.
  Status Prepare();
  // One of `parts` stretches of about the same length; the last ones may be empty.
  std::shared_ptr<DenseSource> Part(int part);
  GradSource& source() { return *source_; }

 private:
  class PartSource;

  const std::shared_ptr<GradSource> source_;
  const int parts_;
  Buffer whole_;
  std::atomic<int> under_way_{0};
};

}  // namespace poseidon
