#include "torch/accumulator_hook.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace poseidon {

namespace {

namespace ag = torch::autograd;

class PostHook final : public ag::FunctionPostHook, public OwnHook {
 public:
  PostHook(std::weak_ptr<AccumulatorHook::Owner> owner, int index) : owner_(std::move(owner)), index_(index) {}
  ag::variable_list operator()(const ag::variable_list& outputs, const ag::variable_list& inputs) override {
    if (InForkedChild()) return outputs;  // its gradients stay its own
    if (auto owner = owner_.lock()) owner->OnAccumulated(index_, inputs.empty() ? at::Tensor() : inputs[0]);
    return outputs;
  }
  // Compiled autograd asks this before it traces. No `override`: the signature has changed between PyTorch's versions.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "poseidon_hvd does not support compiled autograd. Compile the model with torch.compile "
                                "and leave compiled autograd off, or use horovod.torch's DistributedOptimizer.");
  }

 private:
  const std::weak_ptr<AccumulatorHook::Owner> owner_;
  const int index_;
};

}  // namespace

AccumulatorHook::~AccumulatorHook() {
  if (accumulator_) accumulator_->del_post_hook(key_);
}

bool AccumulatorHook::Attach(const at::Tensor& parameter, std::weak_ptr<Owner> owner, int index) {
  if (accumulator_ && ag::impl::try_get_grad_accumulator(parameter) == accumulator_) return false;
  if (accumulator_) accumulator_->del_post_hook(key_);
  accumulator_ = ag::impl::grad_accumulator(parameter);
  key_ = accumulator_->add_post_hook(std::make_unique<PostHook>(std::move(owner), index));
  return true;
}

}  // namespace poseidon
