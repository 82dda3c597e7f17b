// Capture of sufficient factors where every linear call passes: PyTorch's dispatcher.
//
// EnableLinearCapture() gives aten::linear an autograd kernel of ours for CPU tensors. Calls whose weight is registered record a node
// that hands (x, d) to the layer's owner in backward; every other call (no gradient wanted, unknown weight, subclass, transform, tracing)
// runs PyTorch's own code as if this file did not exist.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <memory>

#include "torch/factored_layer.h"

namespace poseidon {

// shared_ptr or intrusive_ptr, depending on PyTorch's version.
using NodePtr = decltype(torch::autograd::Edge::function);

// Who gets what is captured: the session. Called on autograd's threads, without Python's lock.
class CaptureOwner {
 public:
  virtual ~CaptureOwner() = default;
  // x (K x N) and d (K x M) of one call. bias: the parameter that the call used; undefined if none that wants a gradient.
  virtual void OnProfiled(FactoredLayer& layer, const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias) = 0;
  // False: not taken, the node computes ordinary gradients.
  virtual bool OnCaptured(FactoredLayer& layer, const at::Tensor& x, const at::Tensor& d) = 0;
};

// Idempotent. Process-wide and for ever.
void EnableLinearCapture();

// The latest registration of a weight wins. The weight must stay alive until it is unregistered.
void RegisterLayer(const std::shared_ptr<FactoredLayer>& layer, std::weak_ptr<CaptureOwner> owner);
// Does nothing if another layer has taken the weight over.
void UnregisterLayer(const FactoredLayer& layer);

}  // namespace poseidon
