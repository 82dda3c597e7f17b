// A hook on the gradient accumulator of a parameter: a backward pass has reached it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>

#include "torch/layers/capture.h"

namespace poseidon {

class AccumulatorHook {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    // After every execution of the accumulator, also when the gradient is undefined because it was captured. incoming:
    // the gradient that was added to .grad, or became it. On autograd's threads.
    virtual void OnAccumulated(int index, const at::Tensor& incoming) = 0;
  };

  AccumulatorHook() = default;
  AccumulatorHook(AccumulatorHook&& other) noexcept = default;
  AccumulatorHook& operator=(AccumulatorHook&& other) noexcept = default;
  ~AccumulatorHook();

  // Sits on the parameter's present accumulator; false: it did already. PyTorch makes another one when a module is
  // converted.
  bool Attach(const at::Tensor& parameter, std::weak_ptr<Owner> owner, int index);
  // Null before the first Attach(). The reference keeps the accumulator, and so the hook, alive.
  const NodePtr& accumulator() const { return accumulator_; }

 private:
  NodePtr accumulator_;
  uintptr_t key_ = 0;
};

}  // namespace poseidon
