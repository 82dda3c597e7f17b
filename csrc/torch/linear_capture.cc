#include "torch/linear_capture.h"

#include <ATen/ops/linear_native.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "torch/capture.h"
#include "torch/linear_layer.h"

namespace poseidon {

namespace {

namespace ag = torch::autograd;

class LinearBackward final : public CaptureNode {
 public:
  LinearBackward(Registration registration, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                 const at::Tensor& weight_leaf, const at::Tensor& bias_leaf)
      : CaptureNode(std::move(registration), weight, weight_leaf),
        bias_leaf_(bias_leaf),
        x_(x, /*is_output=*/false),
        weight_(weight, /*is_output=*/false),
        direct_bias_(bias_leaf.defined() && bias_leaf.is_same(bias)) {
    if (direct_bias_) ++layer().live_bias_edges;
  }

  ~LinearBackward() override {
    if (direct_bias_) --layer().live_bias_edges;
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
      if (auto owner = this->owner()) {
        auto& layer = static_cast<LinearLayer&>(this->layer());
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

  const at::Tensor bias_leaf_;  // undefined: none that wants a gradient
  ag::SavedVariable x_;
  ag::SavedVariable weight_;
  const bool direct_bias_;
  bool released_ = false;
};

at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const auto ordinary = [&] { return at::native::linear(x, weight, bias); };
  if (!AnyRegistered() || !at::GradMode::is_enabled() || weight.dim() != 2 || x.dim() < 1) return ordinary();
  const at::Tensor weight_leaf = LeafOf(weight);
  if (!weight_leaf.defined()) return ordinary();
  const int64_t rows = x.numel() / std::max<int64_t>(1, weight.size(1));
  std::optional<Registration> registration = FindLayer(FactoredLayer::Kind::kLinear, weight_leaf, rows);
  if (!registration) return ordinary();
  const at::Tensor bias_tensor = bias.value_or(at::Tensor());
  if (HasUserHooks(weight_leaf) || !IsPlain(x) || !IsPlain(weight) || x.scalar_type() != weight.scalar_type() ||
      x.size(-1) != weight.size(1) || (bias_tensor.defined() && !IsPlain(bias_tensor)) || SomebodyWatches()) {
    return ordinary();
  }
  NodePtr node = MakeNode<LinearBackward>(*std::move(registration), x, weight, bias_tensor, weight_leaf, LeafOf(bias_tensor));
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

void AddLinearKernel(torch::Library& library) { library.impl("linear", TORCH_FN(Linear)); }

}  // namespace poseidon
