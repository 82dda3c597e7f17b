#include "torch/layers/capture.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "torch/layers/embedding/embedding_capture.h"
#include "torch/layers/linear/linear_capture.h"

namespace poseidon {

namespace {

namespace ag = torch::autograd;

class Registry {
 public:
  // Never destroyed: a forward may run while the process ends.
  static Registry& Get() {
    static auto* registry = new Registry;
    return *registry;
  }

  bool empty() const { return size_.load(std::memory_order_acquire) == 0; }

  std::optional<Registration> Find(FactoredLayer::Kind kind, const at::Tensor& weight) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const Map& map = by_weight_[static_cast<size_t>(kind)];
    const auto it = map.find(weight.unsafeGetTensorImpl());
    return it == map.end() ? std::nullopt : std::make_optional(it->second);
  }

  void Set(const std::shared_ptr<FactoredLayer>& layer, std::weak_ptr<CaptureOwner> owner) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    MapOf(*layer)[layer->weight().unsafeGetTensorImpl()] = Registration{layer, std::move(owner)};
    Count();
  }

  void Remove(const FactoredLayer& layer) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    Map& map = MapOf(layer);
    const auto it = map.find(layer.weight().unsafeGetTensorImpl());
    if (it != map.end() && it->second.layer.get() == &layer) map.erase(it);
    Count();
  }

 private:
  using Map = std::unordered_map<const c10::TensorImpl*, Registration>;

  Map& MapOf(const FactoredLayer& layer) { return by_weight_[static_cast<size_t>(layer.kind())]; }
  void Count() { size_.store(by_weight_[0].size() + by_weight_[1].size(), std::memory_order_release); }

  mutable std::shared_mutex mutex_;
  std::array<Map, 2> by_weight_;  // by kind; guarded by mutex_
  std::atomic<size_t> size_{0};
};

std::atomic<bool> forked{false};

bool IsUsers(const std::unique_ptr<ag::FunctionPostHook>& hook) {
  return dynamic_cast<const OwnHook*>(hook.get()) == nullptr;
}

}  // namespace

void EnableCapture() {
  static const bool done = [] {
    pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
    auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCPU, __FILE__, __LINE__);
    AddLinearKernel(*library);
    AddEmbeddingKernels(*library);
    return true;
  }();
  (void)done;
}

void RegisterLayer(const std::shared_ptr<FactoredLayer>& layer, std::weak_ptr<CaptureOwner> owner) {
  Registry::Get().Set(layer, std::move(owner));
}

void UnregisterLayer(const FactoredLayer& layer) { Registry::Get().Remove(layer); }

bool AnyRegistered() { return !Registry::Get().empty() && !InForkedChild(); }

bool InForkedChild() { return forked.load(std::memory_order_relaxed); }

std::optional<Registration> FindLayer(FactoredLayer::Kind kind, const at::Tensor& leaf, int64_t rows) {
  std::optional<Registration> registration = Registry::Get().Find(kind, leaf);
  if (!registration) return registration;
  registration->layer->forward_rows += rows;
  if (ag::impl::try_get_grad_accumulator(leaf).get() !=
      registration->layer->accumulator.load(std::memory_order_relaxed)) {
    if (const auto owner = registration->owner.lock()) owner->OnUnattached();
  }
  if (registration->layer->mode() == FactoredLayer::Mode::kBypass) return std::nullopt;
  return registration;
}

at::Tensor LeafOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return at::Tensor();
  const auto& grad_fn = tensor.grad_fn();
  if (!grad_fn) return tensor;
  if (grad_fn->name() != "ToCopyBackward0") return at::Tensor();
  const auto* accumulate = dynamic_cast<const ag::AccumulateGrad*>(grad_fn->next_edge(0).function.get());
  return accumulate != nullptr ? accumulate->variable : at::Tensor();
}

bool HasUserHooks(const at::Tensor& leaf) {
  if (!ag::impl::hooks(leaf).empty() || ag::impl::post_acc_grad_hooks(leaf) != nullptr) return true;
  const auto accumulator = ag::impl::try_get_grad_accumulator(leaf);
  if (!accumulator) return false;
  const auto& post_hooks = accumulator->post_hooks();
  return !accumulator->pre_hooks().empty() || std::any_of(post_hooks.begin(), post_hooks.end(), IsUsers);
}

bool HasHooks(ag::Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() ||
         !node.post_hooks().empty();
}

bool WillAccumulate(const at::Tensor& leaf) {
  if (!leaf.requires_grad()) return false;  // frozen since: AccumulateGrad drops what arrives
  const auto* exec_info = ag::get_current_graph_task_exec_info();
  if (exec_info == nullptr || exec_info->empty()) return true;
  const auto accumulator = ag::impl::try_get_grad_accumulator(leaf);
  const auto it = exec_info->find(accumulator.get());
  return it != exec_info->end() && it->second.needed_ && !it->second.captures_;
}

int CurrentWalk() { return ag::get_current_graph_task_id(); }

bool IsPlain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
                                           c10::DispatchKey::Batched});
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.key_set().has_any(kWrappers) &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !tensor._fw_grad(0).defined();
}

bool SomebodyWatches() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Functionalize) ||
         c10::impl::TorchDispatchModeTLS::any_modes_set();
}

at::Tensor OverTheSameMemory(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

}  // namespace poseidon
