#include "torch/layers/linear/linear_capture.h"

#include <ATen/ops/linear_native.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "torch/layers/capture.h"
#include "torch/layers/linear/linear_layer.h"

namespace poseidon {

namespace {

namespace ag = torch::autograd;

// Saves what PyTorch's own linear saves, when it saves it: x for the weight's gradient, and for x's gradient the
// weight's memory of that moment, whatever .data is assigned later.
class LinearBackward final : public CaptureNode {
 public:
  LinearBackward(Registration registration, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                 const at::Tensor& weight_leaf, const at::Tensor& bias_leaf)
      : CaptureNode(std::move(registration), weight, weight_leaf),
        bias_leaf_(bias_leaf),
        x_(x, /*is_output=*/false),
        in_features_(weight.size(1)),
        out_features_(weight.size(0)),
        direct_bias_(bias_leaf.defined() && bias_leaf.is_same(bias)) {
    if (x.requires_grad()) weight_ = ag::SavedVariable(OverTheSameMemory(weight), /*is_output=*/false);
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
    if (!d.defined()) return out;
    TORCH_CHECK(!released_, ag::ERR_BACKWARD_TWICE);
    const bool want_x = task_should_compute_output(0);
    bool want_weight = task_should_compute_output(1);
    bool want_bias = task_should_compute_output(2);
    const at::Tensor x = want_weight ? x_.unpack() : at::Tensor();  // under checkpointing this runs forward again
    const at::Tensor weight = want_x ? UnpackWeight() : at::Tensor();
    // create_graph: ordinary differentiable gradients for everything.
    const bool ordinary = at::GradMode::is_enabled() || !IsPlain(d);
    // Memory first: a walk that fails for want of it must not have sent anything.
    at::Tensor x_grad;
    if (want_x && !ordinary) x_grad = at::empty({d.numel() / out_features_, in_features_}, d.options());
    if (!ordinary && want_weight) Offer(x, d, &want_weight, &want_bias);
    if (want_weight || want_bias) {
      const at::Tensor d_rows = Rows(d, out_features_);
      if (want_weight) out[1] = d_rows.t().mm(Rows(x, in_features_));
      if (want_bias) out[2] = d_rows.sum(0);
    }
    if (!want_x) return out;
    if (ordinary) {
      out[0] = d.matmul(weight);
    } else {
      at::mm_out(x_grad, Rows(d, out_features_), weight);
      std::vector<int64_t> shape = d.sizes().vec();
      shape.back() = in_features_;
      out[0] = x_grad.view(shape);
    }
    return out;
  }

 private:
  // Hands the factors to the owner. What it takes is wanted no more. Before the GEMM of x's gradient: factors travel
  // while it runs.
  void Offer(const at::Tensor& x, const at::Tensor& d, bool* want_weight, bool* want_bias) {
    const auto owner = this->owner();
    if (!owner) return;
    auto& layer = static_cast<LinearLayer&>(this->layer());
    if (layer.mode() == FactoredLayer::Mode::kCapture && !CanCapture(layer, *want_bias)) {
      owner->OnDeclined(layer);
    } else if (layer.mode() == FactoredLayer::Mode::kCapture) {
      *want_weight = !owner->OnCaptured(layer, Rows(x, in_features_), Rows(d, out_features_));
      *want_bias = *want_bias && (*want_weight || !layer.has_bias());
    } else if (layer.mode() == FactoredLayer::Mode::kProfile && WeightEndsInGrad(1)) {
      const bool with_bias = *want_bias && bias_leaf_.defined() && EndsInGrad(bias_leaf_, direct_bias_, 2);
      owner->OnProfiled(layer, Rows(x, in_features_), Rows(d, out_features_), with_bias ? bias_leaf_ : at::Tensor());
    }
  }

  bool CanCapture(const FactoredLayer& layer, bool want_bias) {
    if (!WeightEndsInGrad(1)) return false;
    if (!layer.has_bias()) return true;
    // The rebuild adds these rows to the bias gradient as well, so they must belong there.
    return want_bias && bias_leaf_.is_same(layer.bias()) && EndsInGrad(bias_leaf_, direct_bias_, 2);
  }

  at::Tensor UnpackWeight() const {
    const at::Tensor weight = weight_.unpack();
    // Differentiable again: what is saved has memory, not history.
    return at::GradMode::is_enabled() ? ag::make_variable(weight, next_edge(1)) : weight;
  }

  const at::Tensor bias_leaf_;  // undefined: none that wants a gradient
  ag::SavedVariable x_;
  ag::SavedVariable weight_;  // if x wants a gradient
  const int64_t in_features_;
  const int64_t out_features_;
  const bool direct_bias_;
  bool released_ = false;
};

at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const auto ordinary = [&] { return at::native::linear(x, weight, bias); };
  if (!AnyRegistered() || !at::GradMode::is_enabled()) return ordinary();
  const at::Tensor weight_leaf = LeafOf(weight);
  if (!weight_leaf.defined()) return ordinary();
  const at::Tensor bias_tensor = bias.value_or(at::Tensor());
  // Who watches comes first: sizes may be symbols.
  if (SomebodyWatches() || !IsPlain(x) || !IsPlain(weight) || (bias_tensor.defined() && !IsPlain(bias_tensor)))
    return ordinary();
  if (weight.dim() != 2 || x.dim() < 1 || x.size(-1) != weight.size(1)) return ordinary();
  const int64_t rows = x.numel() / std::max<int64_t>(1, weight.size(1));
  std::optional<Registration> registration = FindLayer(FactoredLayer::Kind::kLinear, weight_leaf, rows);
  // Hooks are looked for in backward: they may come and go until then, and a recomputed forward must be like the first.
  if (!registration || x.scalar_type() != weight.scalar_type()) return ordinary();
  NodePtr node =
      MakeNode<LinearBackward>(*std::move(registration), x, weight, bias_tensor, weight_leaf, LeafOf(bias_tensor));
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
