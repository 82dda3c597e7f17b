// What the captures of linear and of embedding calls have in common: the registry of weights, whom they report to, and the autograd
// node's accounts.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "torch/factored_layer.h"

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
  // x (K x N) and d (K x M) of one call. bias: the parameter that the call used; undefined if none that wants a gradient.
  virtual void OnProfiled(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias) = 0;
  virtual void OnProfiled(EmbeddingLayer& layer, const TableRows& rows) = 0;
  // False: not taken, the node computes ordinary gradients.
  virtual bool OnCaptured(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d) = 0;
  virtual bool OnCaptured(EmbeddingLayer& layer, const TableRows& rows) = 0;
};

// Gives aten::linear, aten::embedding and aten::embedding_bag an autograd kernel of ours for CPU tensors. Idempotent. Process-wide and
// for ever.
void EnableCapture();

// The latest registration of a weight wins, for each kind of layer. The weight must stay alive until it is unregistered.
void RegisterLayer(const std::shared_ptr<FactoredLayer>& layer, std::weak_ptr<CaptureOwner> owner);
// Does nothing if another layer has taken the weight over.
void UnregisterLayer(const FactoredLayer& layer);

// ---- For the captures themselves

struct Registration {
  std::shared_ptr<FactoredLayer> layer;
  std::weak_ptr<CaptureOwner> owner;
};

// False: Find would find nothing. Cheap.
bool AnyRegistered();

// The layer of that kind that wants this call's factors; none for most calls. `leaf` is what LeafOf gave. Counts the call's rows, which
// are as good as lost if the call is not captured after all.
std::optional<Registration> FindLayer(FactoredLayer::Kind kind, const at::Tensor& leaf, int64_t rows);

// The parameter behind a tensor that a call got as its weight: itself, or, under autocast, what the tensor is a cast of.
at::Tensor LeafOf(const at::Tensor& tensor);

// Hooks want to see, or to change, a local gradient that capture never computes.
bool HasUserHooks(const at::Tensor& leaf);

// Whether the backward that runs now will accumulate into leaf.grad. False for autograd.grad(), which wants the gradient
// itself, and for backward(inputs=...) that leaves this parameter out.
bool WillAccumulate(const at::Tensor& leaf);

// No subclass, transform or forward gradient.
bool IsPlain(const at::Tensor& tensor);
// Such a transform, or a dispatch mode, watches all calls of this thread.
bool SomebodyWatches();

// A tensor of any shape as rows of `features` elements.
inline at::Tensor Rows(const at::Tensor& tensor, int64_t features) { return tensor.reshape({tensor.numel() / features, features}); }

// Keeps the layer's accounts of live nodes.
class CaptureNode : public torch::autograd::Node {
 public:
  CaptureNode(Registration registration, const at::Tensor& weight, const at::Tensor& weight_leaf)
      : registration_(std::move(registration)), weight_leaf_(weight_leaf), direct_weight_(weight_leaf.is_same(weight)) {
    ++layer().pending_nodes;
    if (direct_weight_) ++layer().live_weight_edges;
  }

  // The edges themselves go after this, so for a moment there are more references than accounts: the safe side.
  ~CaptureNode() override {
    NoLongerPending();
    if (direct_weight_) --layer().live_weight_edges;
  }

 protected:
  FactoredLayer& layer() const { return *registration_.layer; }
  std::shared_ptr<CaptureOwner> owner() const { return registration_.owner.lock(); }
  void NoLongerPending() {
    if (std::exchange(pending_, false)) --layer().pending_nodes;
  }

  const Registration registration_;
  const at::Tensor weight_leaf_;

 private:
  const bool direct_weight_;
  bool pending_ = true;
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
