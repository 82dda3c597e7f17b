#include "torch/linear_capture.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace poseidon {

namespace {

namespace ag = torch::autograd;

struct Registration {
  std::shared_ptr<FactoredLayer> layer;
  std::weak_ptr<CaptureOwner> owner;
};

class Registry {
 public:
  // Never destroyed: a forward may run while the process ends.
  static Registry& Get() {
    static auto* registry = new Registry;
    return *registry;
  }

  bool empty() const { return size_.load(std::memory_order_acquire) == 0; }

  std::optional<Registration> Find(const at::Tensor& weight) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto it = by_weight_.find(weight.unsafeGetTensorImpl());
    return it == by_weight_.end() ? std::nullopt : std::make_optional(it->second);
  }

  void Set(const std::shared_ptr<FactoredLayer>& layer, std::weak_ptr<CaptureOwner> owner) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    by_weight_[layer->weight().unsafeGetTensorImpl()] = Registration{layer, std::move(owner)};
    size_.store(by_weight_.size(), std::memory_order_release);
  }

  void Remove(const FactoredLayer& layer) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    const auto it = by_weight_.find(layer.weight().unsafeGetTensorImpl());
    if (it != by_weight_.end() && it->second.layer.get() == &layer) by_weight_.erase(it);
    size_.store(by_weight_.size(), std::memory_order_release);
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Registration> by_weight_;  // guarded by mutex_
  std::atomic<size_t> size_{0};
};

// The parameter behind a tensor that a linear call got: itself, or, under autocast, what the tensor is a cast of.
at::Tensor LeafOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return at::Tensor();
  const auto& grad_fn = tensor.grad_fn();
  if (!grad_fn) return tensor;
  if (grad_fn->name() != "ToCopyBackward0") return at::Tensor();
  const auto* accumulate = dynamic_cast<const ag::AccumulateGrad*>(grad_fn->next_edge(0).function.get());
  return accumulate != nullptr ? accumulate->variable : at::Tensor();
}

// Hooks want to see, or to change, a local gradient that capture never computes.
bool HasUserHooks(const at::Tensor& leaf) {
  return !ag::impl::hooks(leaf).empty() || ag::impl::post_acc_grad_hooks(leaf) != nullptr;
}

// Whether the backward that runs now will accumulate into leaf.grad. False for autograd.grad(), which wants the gradient
// itself, and for backward(inputs=...) that leaves this parameter out.
bool WillAccumulate(const at::Tensor& leaf) {
  const auto* exec_info = ag::get_current_graph_task_exec_info();
  if (exec_info == nullptr || exec_info->empty()) return true;
  const auto accumulator = ag::impl::try_get_grad_accumulator(leaf);
  const auto it = exec_info->find(accumulator.get());
  return it != exec_info->end() && it->second.needed_ && !it->second.captures_;
}

at::Tensor Rows(const at::Tensor& tensor, int64_t features) { return tensor.reshape({tensor.numel() / features, features}); }

class LinearBackward final : public ag::Node {
 public:
  LinearBackward(Registration registration, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                 const at::Tensor& weight_leaf, const at::Tensor& bias_leaf)
      : registration_(std::move(registration)),
        weight_leaf_(weight_leaf),
        bias_leaf_(bias_leaf),
        x_(x, /*is_output=*/false),
        weight_(weight, /*is_output=*/false),
        direct_weight_(weight_leaf.is_same(weight)),
        direct_bias_(bias_leaf.defined() && bias_leaf.is_same(bias)) {
    FactoredLayer& layer = *registration_.layer;
    ++layer.pending_nodes;
    if (direct_weight_) ++layer.live_weight_edges;
    if (direct_bias_) ++layer.live_bias_edges;
  }

  // The edges themselves go after this, so for a moment there are more references than accounts: the safe side.
  ~LinearBackward() override {
    FactoredLayer& layer = *registration_.layer;
    NoLongerPending();
    if (direct_weight_) --layer.live_weight_edges;
    if (direct_bias_) --layer.live_bias_edges;
  }

  std::string name() const override { return "PoseidonLinearBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
    released_ = true;
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ag::variable_list out(3);
    const at::Tensor d = std::move(grads[0]);
    if (!d.defined()) {
      NoLongerPending();
      return out;
    }
    TORCH_CHECK(!released_, ag::ERR_BACKWARD_TWICE);
    const at::Tensor x = x_.unpack();
    const at::Tensor weight = weight_.unpack();
    NoLongerPending();  // after unpacking, which under checkpointing runs forward again

    bool want_weight = task_should_compute_output(1);
    bool want_bias = task_should_compute_output(2);
    // create_graph: ordinary differentiable gradients for everything.
    if (!at::GradMode::is_enabled() && want_weight) {
      if (auto owner = registration_.owner.lock()) {
        FactoredLayer& layer = *registration_.layer;
        if (layer.mode() == FactoredLayer::Mode::kCapture && CanCapture(layer, want_bias)) {
          // Before the input-gradient GEMM below: the factors travel while it runs.
          want_weight = !owner->OnCaptured(layer, Rows(x, layer.layout().in_features), Rows(d, layer.layout().out_features));
          want_bias = want_bias && (want_weight || !layer.has_bias());
        } else if (layer.mode() == FactoredLayer::Mode::kProfile && WillAccumulate(weight_leaf_)) {
          owner->OnProfiled(layer, Rows(x, layer.layout().in_features), Rows(d, layer.layout().out_features), bias_leaf_);
        }
      }
    }
    if (want_weight || want_bias) {
      const at::Tensor d_rows = Rows(d, weight.size(0));
      if (want_weight) out[1] = d_rows.t().mm(Rows(x, weight.size(1)));
      if (want_bias) out[2] = d_rows.sum(0);
    }
    if (task_should_compute_output(0)) out[0] = d.matmul(weight);
    return out;
  }

 private:
  bool CanCapture(const FactoredLayer& layer, bool want_bias) const {
    if (HasUserHooks(weight_leaf_) || !WillAccumulate(weight_leaf_)) return false;
    if (!layer.has_bias()) return true;
    // The rebuild adds these rows to the bias gradient as well, so they must belong there.
    return want_bias && bias_leaf_.is_same(layer.bias()) && !HasUserHooks(bias_leaf_) && WillAccumulate(bias_leaf_);
  }

  void NoLongerPending() {
    if (std::exchange(pending_, false)) --registration_.layer->pending_nodes;
  }

  const Registration registration_;
  const at::Tensor weight_leaf_;
  const at::Tensor bias_leaf_;  // undefined: none that wants a gradient
  ag::SavedVariable x_;
  ag::SavedVariable weight_;
  const bool direct_weight_;
  const bool direct_bias_;
  bool pending_ = true;
  bool released_ = false;
};

template <typename Pointer, typename... Args>
Pointer MakeNode(Args&&... args) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<ag::Node>>) {
    return std::make_shared<LinearBackward>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<LinearBackward>(std::forward<Args>(args)...);
  }
}

bool IsPlain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
                                           c10::DispatchKey::Batched});
  return tensor.layout() == at::kStrided && !tensor.key_set().has_any(kWrappers) && !tensor._fw_grad(0).defined();
}

at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const auto ordinary = [&] { return at::native::linear(x, weight, bias); };
  Registry& registry = Registry::Get();
  if (registry.empty() || !at::GradMode::is_enabled() || weight.dim() != 2 || x.dim() < 1) return ordinary();
  const at::Tensor weight_leaf = LeafOf(weight);
  if (!weight_leaf.defined()) return ordinary();
  std::optional<Registration> registration = registry.Find(weight_leaf);
  if (!registration) return ordinary();
  registration->layer->forward_rows += x.numel() / std::max<int64_t>(1, weight.size(1));
  if (registration->layer->mode() == FactoredLayer::Mode::kBypass) return ordinary();
  const at::Tensor bias_tensor = bias.value_or(at::Tensor());
  if (HasUserHooks(weight_leaf) || !IsPlain(x) || !IsPlain(weight) || x.scalar_type() != weight.scalar_type() ||
      x.size(-1) != weight.size(1) || (bias_tensor.defined() && !IsPlain(bias_tensor)) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return ordinary();
  }
  NodePtr node = MakeNode<NodePtr>(*std::move(registration), x, weight, bias_tensor, weight_leaf, LeafOf(bias_tensor));
  node->set_next_edges(ag::collect_next_edges(x, weight, bias_tensor));
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = ordinary();
  }
  ag::set_history(y, node);
  return y;
}

}  // namespace

void EnableLinearCapture() {
  static const bool done = [] {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCPU, __FILE__, __LINE__);
    library->impl("linear", TORCH_FN(Linear));
    return true;
  }();
  (void)done;
}

void RegisterLayer(const std::shared_ptr<FactoredLayer>& layer, std::weak_ptr<CaptureOwner> owner) {
  Registry::Get().Set(layer, std::move(owner));
}

void UnregisterLayer(const FactoredLayer& layer) { Registry::Get().Remove(layer); }

}  // namespace poseidon
