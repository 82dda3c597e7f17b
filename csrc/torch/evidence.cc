#include "torch/evidence.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/base/median.h"
#include "torch/dtypes.h"
#include "torch/routes/grad_place.h"

namespace poseidon {

namespace {

bool IsCandidate(const at::Tensor& param) {
  return param.dim() == 2 && at::isFloatingType(param.scalar_type()) && param.layout() == at::kStrided &&
         param.is_contiguous() && param.numel() > 0;
}

// Ids travel in 32 bits.
bool IsCandidateTable(const at::Tensor& param) { return param.size(0) <= std::numeric_limits<uint32_t>::max(); }

}  // namespace

Evidence::Evidence(RouteContext& context, std::vector<Parameter>& parameters)
    : context_(context), parameters_(parameters), grouped_(parameters.size()) {
  const SessionOptions& options = context.options;
  for (const std::vector<int>& group : options.groups) {
    for (int index : group) grouped_[index] = true;
  }
  const double scale = options.reduction.op == ReduceOp::kAverage ? 1.0 / options.size : 1.0;
  for (Parameter& p : parameters_) {
    if (!MayFactor(p, options.overrides[p.index])) continue;
    p.candidates.layer = std::make_shared<LinearLayer>(p.name, p.tensor, context.wire_format, scale);
    if (IsCandidateTable(p.tensor)) {
      p.candidates.table = std::make_shared<EmbeddingLayer>(p.name, p.tensor, context.wire_format, scale);
    }
  }
}

Evidence::~Evidence() {
  for (const Parameter& p : parameters_) {
    if (p.candidates.layer) UnregisterLayer(*p.candidates.layer);
    if (p.candidates.table) UnregisterLayer(*p.candidates.table);
  }
}

bool Evidence::CanFactor() const {
  const SessionOptions& options = context_.options;
  return (options.reduction.op == ReduceOp::kAverage || options.reduction.op == ReduceOp::kSum) &&
         options.compression != CompressionKind::kPython;
}

bool Evidence::MayFactor(const Parameter& p, SchemeOverride wish) const {
  const bool asked = wish == SchemeOverride::kSfb || wish == SchemeOverride::kRowSparse;
  const bool may = context_.options.policy != Policy::kAllreduce || asked;
  return may && wish != SchemeOverride::kAllreduce && !InGroup(p) && !p.hooked && CanFactor() && IsCandidate(p.tensor);
}

void Evidence::Attach(Parameter& p) {
  if (!p.candidates.layer) return;
  EnableCapture();
  for (const std::shared_ptr<FactoredLayer>& candidate :
       {p.candidates.layer, std::shared_ptr<FactoredLayer>(p.candidates.table)}) {
    if (!candidate) continue;
    RegisterLayer(candidate, context_.owner);
    profiled_.push_back(candidate);
  }
}

void Evidence::Check(const Parameter& p) {
  const at::Tensor& grad = p.tensor.grad();
  if (!grad.defined()) return;
  for (const std::shared_ptr<FactoredLayer>& layer : profiled_) {
    if (layer == p.candidates.layer || layer == p.candidates.table) layer->CheckWeight(grad);
    if (layer->profiled_bias().is_same(p.tensor)) layer->CheckBias(grad);
  }
}

void Evidence::CheckIncomplete() {
  for (const Parameter& p : parameters_) {
    if (p.counter.touched() && !p.counter.ready()) Check(p);
  }
}

std::vector<TensorProfile> Evidence::Profiles() const {
  std::vector<TensorProfile> profiles;
  for (const Parameter& p : parameters_) {
    TensorProfile tensor;
    tensor.name = p.name;
    tensor.shape = p.tensor.sizes().vec();
    tensor.dtype = ToDType(GradType(p.tensor));
    tensor.active = p.active;
    tensor.used = p.counter.touched();
    tensor.complete = p.step.order >= 0;
    tensor.sparse = p.step.sparse || p.agreed.sparse;
    tensor.order = p.step.order;
    tensor.ready_seconds = p.ready_history.empty() ? -1 : Median(p.ready_history);
    if (p.candidates.layer) {
      p.candidates.layer->FillProfile(&tensor);
      tensor.bias = CoveredBias(p);
      FillTableProfile(p, &tensor);
    } else {
      tensor.reason = WhyNoLayer(p);
    }
    profiles.push_back(std::move(tensor));
  }
  return profiles;
}

std::string Evidence::WhyNoLayer(const Parameter& p) const {
  if (p.hooked) return "a hook looks at its gradient before reduction";
  if (p.tensor.dim() != 2) return "it is no matrix";
  if (InGroup(p)) return "it is part of a group";
  if (context_.options.compression == CompressionKind::kPython) return "the compressor is not one of Horovod's own";
  if (!CanFactor()) return "the reduction is neither an average nor a sum";
  if (!p.tensor.is_contiguous()) return "it is not contiguous";
  return "allreduce was asked for";
}

// The bias whose gradient a layer's rows give too; empty if another way must, and then only the weight is factored.
std::string Evidence::CoveredBias(const Parameter& p) const {
  const at::Tensor& bias = p.candidates.layer->profiled_bias();
  if (!bias.defined()) return "";
  const auto owner = std::find_if(parameters_.begin(), parameters_.end(),
                                  [&](const Parameter& other) { return other.tensor.is_same(bias); });
  if (owner == parameters_.end() || InGroup(*owner) || owner->hooked || !owner->own) return "";
  const bool shared = std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& other) {
    return &other != &p && other.candidates.layer && other.candidates.layer->profiled_bias().is_same(bias);
  });
  return shared ? "" : owner->name;
}

// The table's part of the entry, after the linear layer's.
void Evidence::FillTableProfile(const Parameter& p, TensorProfile* tensor) const {
  const Candidates& candidates = p.candidates;
  const bool linear = candidates.layer->kind() == FactoredLayer::Kind::kLinear;
  if (linear && (!candidates.table || !candidates.table->profiled())) return;
  const EmbeddingLayer& table =
      candidates.table ? *candidates.table : static_cast<const EmbeddingLayer&>(*candidates.layer);
  if (candidates.table && candidates.layer->profiled()) {  // tied: neither kind of factors gives all of its gradient
    tensor->is_embedding = true;
    tensor->sfb_allowed = false;
    if (tensor->reason.empty()) tensor->reason = "it is an embedding table too";
    return;
  }
  table.FillProfile(tensor);
  const bool as_dense = context_.options.sparse_as_dense;
  // Fewer passes than configured: the hook has not looked at the gradient yet.
  if (table.profiled_sparse() && !p.counter.sent() && !as_dense) tensor->sparse = true;
  if (table.profiled_sparse() && as_dense) {
    tensor->sfb_allowed = false;
    tensor->reason = "sparse_as_dense asks for a dense reduction";
  }
}

void Evidence::Follow(Parameter& p, const MergedTensor& merged, int64_t plan) {
  ChooseCandidate(p, merged.base);
  if (!merged.sfb_allowed && merged.base.used && plan >= p.candidates.retry_plan) Refuse(p, plan);
}

// A matrix is looked at as a linear weight and as a table until it is known which of them it is; then the other takes
// no more calls.
void Evidence::ChooseCandidate(Parameter& p, const TensorProfile& profile) {
  Candidates& candidates = p.candidates;
  if (!candidates.table || !profile.used || (!profile.is_embedding && !profile.is_linear_weight)) return;
  const bool table = profile.is_embedding && !profile.is_linear_weight;
  const std::shared_ptr<FactoredLayer> other = table ? candidates.layer : candidates.table;
  if (table) candidates.layer = candidates.table;
  candidates.table = nullptr;
  other->set_mode(FactoredLayer::Mode::kBypass);
  UnregisterLayer(*other);
  if (profile.is_embedding && profile.is_linear_weight) candidates.layer->Object("it is an embedding table too");
}

void Evidence::BypassUnlessCaptured(const Parameter& p) {
  const std::shared_ptr<FactoredLayer>& layer = p.candidates.layer;
  if (layer && layer->profiled() && layer->mode() != FactoredLayer::Mode::kCapture)
    layer->set_mode(FactoredLayer::Mode::kBypass);
}

void Evidence::Object(Parameter& p, const std::string& reason, int64_t plan) {
  if (p.candidates.layer) p.candidates.layer->Object(reason);
  Refuse(p, plan);
}

void Evidence::Refuse(Parameter& p, int64_t plan) {
  constexpr int kMostDoublings = 16;
  p.candidates.retry_plan = plan + (int64_t{1} << std::min(p.candidates.refusals, kMostDoublings));
  ++p.candidates.refusals;
}

void Evidence::LookAgain(int64_t plan) {
  for (Parameter& p : parameters_) {
    const std::shared_ptr<FactoredLayer>& layer = p.candidates.layer;
    if (!layer || !p.active || p.candidates.refusals == 0 || plan < p.candidates.retry_plan) continue;
    if (layer->mode() != FactoredLayer::Mode::kBypass) continue;
    layer->set_mode(FactoredLayer::Mode::kProfile);
    layer->RestartProfile();
    profiled_.push_back(layer);
  }
}

void Evidence::EndStep() {
  for (const Parameter& p : parameters_) {
    if (p.candidates.layer) p.candidates.layer->EndStepOfProfile();
  }
}

void Evidence::Restart(bool planned) {
  if (planned) {
    profiled_.erase(std::remove_if(profiled_.begin(), profiled_.end(),
                                   [](const auto& layer) { return layer->mode() != FactoredLayer::Mode::kProfile; }),
                    profiled_.end());
  }
  for (const auto& layer : profiled_) layer->RestartProfile();
}

}  // namespace poseidon
