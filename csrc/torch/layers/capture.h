// What the captures of linear and of embedding calls have in common: the registry of weights, whom they report to, and
// the autograd node's accounts.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "torch/layers/factored_layer.h"

namespace poseidon {

class EmbeddingLayer;
class LinearLayer;
struct TableRows;

// shared_ptr or intrusive_ptr, depending on PyTorch's version.
using NodePtr = decltype(torch::autograd::Edge::function);

// Who gets what is captured: the session. Called on autograd's threads, without Python's lock.
class CaptureOwner {
 public:
  virtual ~CaptureOwner() = default;
  // x (K x N) and d (K x M) of one call. bias: the parameter that the call used; undefined if none that wants a
  // gradient.
  virtual void OnProfiled(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias) = 0;
  virtual void OnProfiled(EmbeddingLayer& layer, const TableRows& rows) = 0;
  // False: not taken, the node computes ordinary gradients.
  virtual bool OnCaptured(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d) = 0;
  virtual bool OnCaptured(EmbeddingLayer& layer, const TableRows& rows) = 0;
  // A call of a captured layer computes its ordinary gradient, because somebody looks at it or it goes elsewhere.
  // Before it is accumulated.
  virtual void OnDeclined(FactoredLayer& layer) = 0;
  // A call uses a weight whose gradient accumulator has not the owner's hook: it was unfrozen, or converted. In
  // forward.
  virtual void OnUnattached() = 0;
};

// Gives aten::linear, aten::embedding and aten::embedding_bag an autograd kernel of ours for CPU tensors. Idempotent.
// Process-wide and for ever.
void EnableCapture();

// The latest registration of a weight wins, for each kind of layer. The weight must stay alive until it is
// unregistered.
void RegisterLayer(const std::shared_ptr<FactoredLayer>& layer, std::weak_ptr<CaptureOwner> owner);
// Does nothing if another layer has taken the weight over.
void UnregisterLayer(const FactoredLayer& layer);

// ---- For the captures themselves

struct Registration {
  std::shared_ptr<FactoredLayer> layer;
  std::weak_ptr<CaptureOwner> owner;
};

// False: FindLayer would find nothing, or this is a forked child, in which nothing can be sent. Cheap.
bool AnyRegistered();
bool InForkedChild();

// The layer of that kind that wants this call's factors; none for most calls. `leaf` is what LeafOf gave. Counts the
// call's rows, which are as good as lost if the call is not captured after all.
std::optional<Registration> FindLayer(FactoredLayer::Kind kind, const at::Tensor& leaf, int64_t rows);

// The parameter behind a tensor that a call got as its weight: itself, or, under autocast, what the tensor is a cast
// of.
at::Tensor LeafOf(const at::Tensor& tensor);

// True if a hook wants to see, or to change, a local gradient that capture never computes: a hook on the tensor, after
// its accumulation, or on its gradient accumulator (any but ours).
bool HasUserHooks(const at::Tensor& leaf);
// The same of a node of the graph: between a call's node and the accumulator, where the weight is a cast.
bool HasHooks(torch::autograd::Node& node);

// Marks our own hooks on gradient accumulators, which are no user's.
class OwnHook {
 public:
  virtual ~OwnHook() = default;
};

// Whether the walk that runs now will accumulate into leaf.grad. False for autograd.grad(), which wants the gradient
// itself, for backward(inputs=...) that leaves this parameter out, and for a parameter that was frozen after the
// forward.
bool WillAccumulate(const at::Tensor& leaf);

// A walk is one execution of the graph by backward(). Its id, which no other walk of the process has; -1 outside of
// walks.
int CurrentWalk();

// The one question before a kernel looks at sizes: an ordinary CPU tensor with known sizes. No subclass, transform,
// forward gradient, nested, fake or symbolic tensor.
bool IsPlain(const at::Tensor& tensor);
// A transform or a dispatch mode watches all calls of this thread.
bool SomebodyWatches();

// A tensor of its own over the same memory, with the same version counter. It keeps the memory that `tensor` has now,
// whatever .data is assigned later. A tensor that Python has seen is referenced by its Python object as long as anybody
// else references it, so only references to the memory tell whether a buffer is still in use.
at::Tensor OverTheSameMemory(const at::Tensor& tensor);

// A tensor of any shape as rows of `features` elements.
inline at::Tensor Rows(const at::Tensor& tensor, int64_t features) {
  return tensor.reshape({tensor.numel() / features, features});
}

// Keeps the layer's accounts of live nodes.
class CaptureNode : public torch::autograd::Node {
 public:
  CaptureNode(Registration registration, const at::Tensor& weight, const at::Tensor& weight_leaf)
      : registration_(std::move(registration)), weight_leaf_(weight_leaf), direct_weight_(weight_leaf.is_same(weight)) {
    ++layer().live_nodes;
    if (direct_weight_) ++layer().live_weight_edges;
  }

  // The edges themselves go after this, so for a moment there are more references than accounts: the safe side.
  ~CaptureNode() override {
    --layer().live_nodes;
    if (direct_weight_) --layer().live_weight_edges;
  }

 protected:
  FactoredLayer& layer() const { return *registration_.layer; }
  std::shared_ptr<CaptureOwner> owner() const { return registration_.owner.lock(); }

  // The rule of capture (docs/sfb.md): what this node would give to input `edge` ends up in leaf.grad and nowhere else,
  // and nobody looks at it on its way.
  bool EndsInGrad(const at::Tensor& leaf, bool direct, size_t edge) {
    return WillAccumulate(leaf) && !HasUserHooks(leaf) && post_hooks().empty() &&
           (direct || !HasHooks(*next_edge(edge).function));
  }
  bool WeightEndsInGrad(size_t edge) { return EndsInGrad(weight_leaf_, direct_weight_, edge); }

  const Registration registration_;
  const at::Tensor weight_leaf_;

 private:
  const bool direct_weight_;
};

template <typename T, typename... Args>
NodePtr MakeNode(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<T>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

}  // namespace poseidon
