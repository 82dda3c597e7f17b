#include "torch/routes/factors_route.h"

#include <algorithm>
#include <utility>

#include "core/model/cost_model.h"
#include "torch/dtypes.h"
#include "torch/layers/factor_kernels.h"
#include "torch/membership.h"
#include "torch/routes/grad_place.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

std::vector<Parameter*> WithBias(Parameter& weight, Parameter* bias) {
  return bias == nullptr ? std::vector<Parameter*>{&weight} : std::vector<Parameter*>{&weight, bias};
}

std::shared_ptr<SfbExchange> NewExchange(const RouteContext& context, const std::shared_ptr<FactoredLayer>& layer,
                                         const std::vector<Parameter*>& members) {
  SfbExchange::Options options;
  options.scheme = layer->scheme();
  options.parameter = members.front()->name;
  options.layout = layer->layout();
  options.factor_dtype = ToDType(layer->wire_type());
  options.extra_reduction = context.options.reduction;
  options.process_set = context.options.process_set;
  options.size = context.options.size;
  for (const Parameter* p : members) {
    const DType wire = ToDType(context.DenseWireType(*p));
    options.dense_bytes += AllreduceWireBytes(p->tensor.numel(), wire, options.size);
  }
  const char* kind = options.scheme == Scheme::kSfb ? "sfb" : "rows";
  return std::make_shared<SfbExchange>(context.WireName(kind, options.parameter), layer, options);
}

}  // namespace

FactorsRoute::FactorsRoute(RouteContext& context, std::shared_ptr<FactoredLayer> layer, Parameter& weight,
                           Parameter* bias)
    : Route(context, WithBias(weight, bias)),
      layer_(std::move(layer)),
      exchange_(NewExchange(context, layer_, members())) {
  layer_->route = this;
}

FactorsRoute::~FactorsRoute() {
  if (layer_->route == this) layer_->route = nullptr;
}

bool FactorsRoute::OnCall(int walk, const std::function<void(bool)>& append) {
  const bool last_pass = weight().counter.remaining() == 1;
  append(last_pass);
  if (!NothingElseCanAdd(walk)) return false;
  layer_->KeepWalk(walk);
  if (Send()) ++context_.stats.early_messages;
  return true;
}

// In the last pass, with all rows of this layer's calls at hand: may something else in this walk still add to the
// weight or the bias? Whatever could holds a reference to their gradient accumulator. So do we, and each live node of
// ours; when that explains all references there is nothing else. More references than accounts, or nodes that this walk
// does not reach, only delay the send until the accumulator's own hook.
bool FactorsRoute::NothingElseCanAdd(int walk) const {
  if (!layer_->AllNodesRan(walk)) return false;
  const int64_t live[] = {layer_->live_weight_edges, layer_->live_bias_edges};
  for (size_t part = 0; part < members().size(); ++part) {
    const Parameter& p = *members()[part];
    if (p.counter.remaining() != 1 || !p.hook.accumulator()) return false;
    if (static_cast<int64_t>(p.hook.accumulator().use_count()) != 1 + live[part]) return false;
  }
  return true;
}

bool FactorsRoute::OnPass(Parameter& member, int walk) {
  layer_->EndPass(&member == &weight() ? FactorLayer::kWeight : FactorLayer::kBias, walk);
  SendIfComplete();
  return true;
}

void FactorsRoute::SendIfComplete() {
  const bool complete = std::all_of(members().begin(), members().end(), [](const Parameter* p) {
    return p->counter.ready() || !p->tensor.requires_grad();  // frozen, so that nothing will come
  });
  if (!complete || weight().counter.sent()) return;
  Send();
  context_.NoteReady(members());
}

bool FactorsRoute::Send() {
  if (weight().counter.sent() || !MayGather()) return false;
  Buffer message;
  uint32_t flags = 0;
  double pack_seconds = 0;
  const bool reached =
      std::any_of(members().begin(), members().end(), [](const Parameter* p) { return p->counter.touched(); });
  ThrowIfError(layer_->PrepareMessage(reached, &message, &flags, &pack_seconds));
  exchange_->SetMessage(message, flags, pack_seconds);
  NoteThreadsOfTorch();
  context_.Submit(exchange_, members());
  for (Parameter* p : members()) p->counter.MarkSent();
  return true;
}

bool FactorsRoute::MayGather() {
  if (!context_.options.uneven_steps) return true;
  const Membership& membership = *context_.membership;
  held_ = !membership.Known();
  if (membership.SomeRankIsMissing()) {
    ThrowIfError(layer_->MakeDense());
    if (whole_.empty()) {
      for (Parameter* p : members()) whole_.push_back(std::make_unique<WholeRoute>(context_, *p, /*planned=*/false));
    }
    sent_whole_ = true;
    for (const auto& each : whole_) each->Send();
  }
  return membership.AllAreHere();
}

void FactorsRoute::OnMembership() {
  if (held_) Send();
}

void FactorsRoute::Flush(Parameter&) { Send(); }

Status FactorsRoute::Finish(Parameter& member) {
  const size_t part = &member == &weight() ? 0 : 1;
  if (sent_whole_) return whole_[part]->Finish(member);
  return part == 0 ? layer_->FinishStep() : Status::OK();
}

// The one left in flight keeps its layer and its buffers.
std::shared_ptr<Route> FactorsRoute::Successor() {
  if (!InFlight(exchange_.get())) {
    layer_->DropStep();
    return shared_from_this();
  }
  Parameter& w = weight();
  w.candidates.layer = layer_->Renew();
  RegisterLayer(w.candidates.layer, context_.owner);
  return std::make_shared<FactorsRoute>(context_, w.candidates.layer, w, members().size() > 1 ? members()[1] : nullptr);
}

void FactorsRoute::Retire() {
  layer_->set_mode(FactoredLayer::Mode::kBypass);
  layer_->DropStep();
}

std::string FactorsRoute::Objection() const {
  if (sent_whole_ || (exchange_->gathered_flags() & kFlagForeign) == 0) return "";
  return std::string("part of its gradient came from elsewhere than ") + layer_->calls_text();
}

void FactorsRoute::CountStep(SessionStats* stats) const {
  if (!sent_whole_) stats->of(exchange_->scheme()).tensors += static_cast<int64_t>(members().size());
}

std::shared_ptr<Route> MakeFactorsRoute(const RouteRequest& request) {
  Parameter& weight = request.parameter;
  const TensorProfile& profile = request.merged.base;
  const SessionOptions& options = request.context.options;
  // By name: a rank that did not use the layer in step 0 has not seen its bias.
  const auto bias = std::find_if(request.all.begin(), request.all.end(),
                                 [&](const Parameter& p) { return !profile.bias.empty() && p.name == profile.bias; });
  const bool has_bias = bias != request.all.end();
  FactoredLayer::Settings settings;
  if (has_bias) settings.bias = bias->tensor;
  settings.factor_type = ToScalarType(profile.factor_dtype);
  settings.wire_type = ToScalarType(request.context.wire_format.Gathered(profile.factor_dtype));
  settings.max_elements =
      std::min(options.max_gathered_elements, request.context.wire_format.traits.max_elements) / options.size;
  settings.sparse = weight.agreed.sparse;
  weight.candidates.layer->StartCapture(settings);
  return std::make_shared<FactorsRoute>(request.context, weight.candidates.layer, weight, has_bias ? &*bias : nullptr);
}

}  // namespace poseidon
