// Session's part in the agreement: what every rank contributes in step 0, the plan that rank 0 makes of it, and what
// follows from it.
#include <algorithm>
#include <utility>

#include <ATen/Parallel.h>

#include "core/base/median.h"
#include "core/model/cost_model.h"
#include "torch/dtypes.h"
#include "torch/routes/grad_place.h"
#include "torch/session.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

// To three significant bits.
int64_t RoundUp(int64_t rows) {
  int64_t step = 1;
  while (rows / step > 7) step *= 2;
  return (rows + step - 1) / step * step;
}

}  // namespace

std::string Session::WireName(const char* kind, const std::string& name) const {
  return "poseidon." + options_.tag + "." + kind + "." + name;
}

// The parameter's gradient is complete in .grad and has not been sent: the guard's moment.
void Session::CheckProfile(Parameter& p) {
  const at::Tensor& grad = p.tensor.grad();
  if (!grad.defined()) return;
  for (const std::shared_ptr<FactoredLayer>& layer : profiled_) {
    if (layer == p.layer || layer == p.table) layer->CheckWeight(grad);
    if (layer->profiled_bias().is_same(p.tensor)) layer->CheckBias(grad);
  }
}

std::string Session::WhyNoLayer(const Parameter& p) const {
  if (p.hooked) return "a hook looks at its gradient before reduction";
  if (p.tensor.dim() != 2) return "it is no matrix";
  if (p.group >= 0) return "it is part of a group";
  if (options_.compression == CompressionKind::kPython) return "the compressor is not one of Horovod's own";
  if (!CanFactor()) return "the reduction is neither an average nor a sum";
  if (!p.tensor.is_contiguous()) return "it is not contiguous";
  return "allreduce was asked for";
}

// The bias whose gradient a layer's rows give too; empty if another way must, and then only the weight is factored.
std::string Session::CoveredBias(const Parameter& p) const {
  const at::Tensor& bias = p.layer->profiled_bias();
  if (!bias.defined()) return "";
  const auto owner = std::find_if(parameters_.begin(), parameters_.end(),
                                  [&](const Parameter& other) { return other.tensor.is_same(bias); });
  if (owner == parameters_.end() || owner->group >= 0 || owner->hooked || !owner->own) return "";
  const bool shared = std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& other) {
    return &other != &p && other.layer && other.layer->profiled_bias().is_same(bias);
  });
  return shared ? "" : owner->name;
}

// The table's part of the entry, after the linear layer's.
void Session::FillTableProfile(const Parameter& p, TensorProfile* tensor) const {
  if (p.layer->kind() == FactoredLayer::Kind::kLinear && (!p.table || !p.table->profiled())) return;
  const EmbeddingLayer& table = p.table ? *p.table : static_cast<const EmbeddingLayer&>(*p.layer);
  if (p.table && p.layer->profiled()) {  // tied: neither kind of factors gives all of its gradient
    tensor->is_embedding = true;
    tensor->sfb_allowed = false;
    if (tensor->reason.empty()) tensor->reason = "it is an embedding table too";
    return;
  }
  table.FillProfile(tensor);
  // Fewer passes than configured: the hook has not looked at the gradient yet.
  if (table.profiled_sparse() && !p.counter.sent() && !options_.sparse_as_dense) tensor->sparse = true;
  if (table.profiled_sparse() && options_.sparse_as_dense) {
    tensor->sfb_allowed = false;
    tensor->reason = "sparse_as_dense asks for a dense reduction";
  }
}

RankProfile Session::LocalProfile() const {
  RankProfile profile;
  profile.settings_text = options_.settings;
  profile.settings_hash = HashBytes(options_.settings.data(), options_.settings.size());
  profile.compute_seconds = Median(compute_history_);
  if (!options_.network.known()) {  // a given network is taken at its word
    profile.step_seconds = Median(step_history_);
    profile.first_step_seconds = first_step_seconds_;
  }
  for (const Parameter& p : parameters_) {
    TensorProfile tensor;
    tensor.name = p.name;
    tensor.shape = p.tensor.sizes().vec();
    tensor.dtype = ToDType(GradType(p.tensor));
    tensor.active = p.active;
    tensor.used = p.counter.touched();
    tensor.complete = p.order >= 0;
    tensor.sparse = p.sparse_now || p.sparse;
    tensor.order = p.order;
    tensor.ready_seconds = p.ready_history.empty() ? -1 : Median(p.ready_history);
    if (p.layer) {
      p.layer->FillProfile(&tensor);
      tensor.bias = CoveredBias(p);
      FillTableProfile(p, &tensor);
    } else {
      tensor.reason = WhyNoLayer(p);
    }
    profile.tensors.push_back(std::move(tensor));
  }
  return profile;
}

Agreement Session::MakeAgreement() {
  Agreement::Options options;
  options.prefix = "poseidon." + options_.tag;
  options.process_set = options_.process_set;
  options.rank = options_.rank;
  options.chooser = {
      options_.policy, {options_.size, wire_format_}, options_.overrides, options_.dense, options_.gather_memory_bytes};
  options.network = options_.network;
  Agreement::Local local;
  local.tensors = [this] {
    std::vector<LocalTensor> tensors;
    for (const Parameter& p : parameters_) tensors.push_back({p.name, p.tensor.sizes().vec()});
    return tensors;
  };
  local.profile = [this] { return LocalProfile(); };
  local.costs = [this](const MergedProfile& merged) { return MeasureCosts(merged); };
  local.question = [this](const MergedProfile& merged, Question* question) {
    question->may_share = WhichMayShare(merged);
    question->kept = UnusedButFactored(merged);
    question->step = stats_.steps;
    question->reconstruct_threads = at::get_num_threads();
    question->update_seconds = update_seconds_;
  };
  return Agreement(engine_.get(), std::move(options), std::move(local));
}

Status Session::AgreeOnPlan() {
  Status status = agreement_.Agree(plan_, steps_under_plan_, schedule_.rows_have_changed(), &next_plan_);
  if (!status.ok()) return status;
  adopt_next_plan_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!planned_) parameters_[i].sparse = agreement_.profile().tensors[i].sparse;
    const TensorDecision& decision = next_plan_.decisions[i];
    if (decision.request_refused && !planned_) warnings_.push_back(decision.name + ": " + decision.reason + ".");
  }
  if (next_plan_.reconstruct_threads != at::get_num_threads() && !planned_) {
    warnings_.push_back(
        "this rank computes with " + std::to_string(at::get_num_threads()) + " threads and rank 0 with " +
        std::to_string(next_plan_.reconstruct_threads) +
        ": gradients rebuilt from factors may differ in the last bits between them. Set OMP_NUM_THREADS alike.");
  }
  return Status::OK();
}

// At the end of step 0, and whenever a later plan is made. The same on all ranks, because it depends on agreed values
// alone.
bool Session::PlanIsDue() const {
  if (!planned_) return true;
  if (options_.size <= 1 || (options_.policy == Policy::kAllreduce && !GoesByTime())) return false;
  return schedule_.Due();
}

// Ranks that have joined take part in allreduces only, so while there are such a plan that needs none of them now is
// kept; the first plan is put off step by step.
bool Session::PutOffWhileRanksAreMissing() {
  bool missing = SomeRankIsMissing();
  if (!options_.uneven_steps) {
    double ranks = 1;
    ThrowIfFailed(
        poseidon::SumOverRanks(*engine_, WireName("agree", "live"), options_.process_set, options_.size, &ranks));
    missing = ranks < options_.size;
  }
  if (missing) schedule_.PutOff();
  return missing;
}

// That the plan in force was made for.
double Session::ExpectedRows(const Factored& factored) const {
  const MergedTensor& merged = agreement_.profile().tensors[factored.weight];
  const bool table = plan_.decisions[factored.weight].scheme == Scheme::kRowSparse;
  return static_cast<double>(table ? merged.global_unique_rows : merged.global_rows);
}

// Every rank has read the same gathered rows.
void Session::NoteRows() {
  if (SomeRankIsMissing()) return;
  const bool other = std::any_of(factored_.begin(), factored_.end(), [&](const Factored& factored) {
    return schedule_.AreOtherRows(static_cast<double>(factored.exchange->gathered_rows()), ExpectedRows(factored));
  });
  if (schedule_.NoteRows(other)) ForgetSteps();
}

// Steps from now on are not like those before. The same on all ranks.
void Session::ForgetSteps() {
  step_history_.clear();
  steps_under_plan_ = 0;
}

// What this rank's processor takes for the layers that may be factored.
ComputeCosts Session::MeasureCosts(const MergedProfile& profile) {
  ComputeCosts costs;
  costs.layers.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const MergedTensor& merged = profile.tensors[i];
    if (!merged.sfb_allowed || merged.global_rows == 0 || parameters_[i].tensor.dim() != 2) continue;
    const bool table = merged.base.is_embedding;
    const int64_t gathered = table ? merged.global_unique_rows : merged.global_rows;
    // Rounded, so that rows that vary a little from plan to plan are not measured anew.
    LayerShape shape;
    shape.table = table;
    shape.out_features = parameters_[i].tensor.size(0);
    shape.in_features = parameters_[i].tensor.size(1);
    shape.rows = RoundUp(merged.max_rank_rows);
    shape.global_rows = RoundUp(gathered);
    shape.ranks = options_.size;
    shape.gradient = GradType(parameters_[i].tensor);
    shape.wire = ToScalarType(wire_format_.Gathered(merged.base.factor_dtype));
    LayerCost& cost = costs.layers[i];
    cost = calibration_.CostOf(shape);
    const double share = static_cast<double>(merged.max_rank_rows) / static_cast<double>(shape.rows);
    for (double* seconds : {&cost.local, &cost.input, &cost.pack}) *seconds *= share;
    if (!table) cost.rebuild *= static_cast<double>(gathered) / static_cast<double>(shape.global_rows);
  }
  costs.contention = calibration_.Contention();
  costs.copy = calibration_.Copy();
  return costs;
}

// A layer that nobody used in this step says nothing of the next one: it stays what it is.
std::vector<const TensorDecision*> Session::UnusedButFactored(const MergedProfile& profile) const {
  std::vector<const TensorDecision*> kept(parameters_.size());
  for (size_t i = 0; i < plan_.decisions.size(); ++i) {
    const bool factored = parameters_[i].layer_weight == static_cast<int>(i);
    if (factored && profile.tensors[i].global_rows == 0) kept[i] = &plan_.decisions[i];
  }
  return kept;
}

void Session::AdoptPlan() {
  bool changed = false;  // and so tried; what is decided by given values needs no trial
  for (size_t i = 0; i < parameters_.size(); ++i) {
    changed =
        changed || (parameters_[i].layer_weight == static_cast<int>(i)) != IsFactored(next_plan_.decisions[i].scheme);
  }
  schedule_.Made(/*trial=*/planned_ && changed && agreement_.profile().step_seconds > 0);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool factored = parameters_[i].layer_weight == static_cast<int>(i);
    if (factored && !IsFactored(next_plan_.decisions[i].scheme)) RemoveFactored(static_cast<int>(i));
  }
  const bool same_slices = plan_.slices == next_plan_.slices && plan_.dense_method == next_plan_.dense_method;
  first_under_plan_ = !planned_ || changed || !same_slices;
  plan_ = std::move(next_plan_);
  planned_ = true;
  if (!same_slices) MakeSlices();
  ForgetSteps();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    const MergedTensor& merged = agreement_.profile().tensors[i];
    p.sparse = merged.sparse;
    p.everywhere = merged.everywhere;
    ChooseCandidate(p, merged.base);
    if (!merged.sfb_allowed && merged.base.used && schedule_.plans() >= p.retry_plan) Refuse(p);
    if (IsFactored(plan_.decisions[i].scheme)) {
      if (p.layer_weight < 0) StartFactored(static_cast<int>(i));
    } else if (p.layer && p.layer->profiled()) {
      // Calls stay registered, since a later plan may factor the layer. One without calls on this rank is profiled when
      // they come.
      p.layer->set_mode(FactoredLayer::Mode::kBypass);
    }
  }
  for (const Factored& factored : factored_) DecideBias(factored, Scheme::kSfb);
}

// A matrix is looked at as a linear weight and as a table until it is known which of them it is; then the other takes
// no more calls.
void Session::ChooseCandidate(Parameter& p, const TensorProfile& profile) {
  if (!p.table || !profile.used || (!profile.is_embedding && !profile.is_linear_weight)) return;
  const bool table = profile.is_embedding && !profile.is_linear_weight;
  const std::shared_ptr<FactoredLayer> other = table ? p.layer : p.table;
  if (table) p.layer = p.table;
  p.table = nullptr;
  other->set_mode(FactoredLayer::Mode::kBypass);
  UnregisterLayer(*other);
  if (profile.is_embedding && profile.is_linear_weight) p.layer->Object("it is an embedding table too");
}

// A bias has no scheme of its own: it follows its weight.
void Session::DecideBias(const Factored& factored, Scheme scheme) {
  if (factored.bias < 0) return;
  parameters_[factored.bias].layer_weight = scheme == Scheme::kSfb ? factored.weight : -1;
  TensorDecision& decision = plan_.decisions[factored.bias];
  decision.scheme = scheme;
  decision.global_rows = plan_.decisions[factored.weight].global_rows;
  decision.Remove(Scheme::kSfb);
  if (scheme == Scheme::kSfb) decision.Put({Scheme::kSfb, 0, -1, ""});
  decision.reason = "follows " + parameters_[factored.weight].name;
}

void Session::StartFactored(int weight_index) {
  Parameter& weight = parameters_[weight_index];
  const TensorProfile& profile = agreement_.profile().tensors[weight_index].base;
  Factored factored;
  factored.weight = weight.layer_weight = weight_index;
  // By name: a rank that did not use the layer in step 0 has not seen its bias.
  for (size_t i = 0; i < parameters_.size() && !profile.bias.empty(); ++i) {
    if (parameters_[i].name == profile.bias) factored.bias = static_cast<int>(i);
  }
  DecideBias(factored, Scheme::kSfb);
  const DType wire = wire_format_.Gathered(profile.factor_dtype);
  FactoredLayer::Settings settings;
  if (factored.bias >= 0) settings.bias = parameters_[factored.bias].tensor;
  settings.factor_type = ToScalarType(profile.factor_dtype);
  settings.wire_type = ToScalarType(wire);
  settings.max_elements = std::min(options_.max_gathered_elements, wire_format_.traits.max_elements) / options_.size;
  settings.sparse = weight.sparse;
  weight.layer->StartCapture(settings);
  factored.exchange = NewSfbExchange(factored);
  factored_.push_back(std::move(factored));
}

std::shared_ptr<SfbExchange> Session::NewSfbExchange(const Factored& factored) const {
  const Parameter& weight = parameters_[factored.weight];
  SfbExchange::Options options;
  options.scheme = weight.layer->scheme();
  options.parameter = weight.name;
  options.layout = weight.layer->layout();
  options.factor_dtype = ToDType(weight.layer->wire_type());
  options.extra_reduction = options_.reduction;
  options.process_set = options_.process_set;
  options.size = options_.size;
  for (int index : {factored.weight, factored.bias}) {
    if (index < 0) continue;
    const at::Tensor& param = parameters_[index].tensor;
    const DType wire = wire_format_.Reduced(ToDType(GradType(param)));
    options.dense_bytes += AllreduceWireBytes(param.numel(), wire, options_.size);
  }
  const char* kind = options.scheme == Scheme::kSfb ? "sfb" : "rows";
  return std::make_shared<SfbExchange>(WireName(kind, weight.name), weight.layer, options);
}

// The exchange was abandoned in flight: it keeps the old layer and its buffers, and this session goes on with new ones.
void Session::RenewFactored(Factored& factored) {
  Parameter& weight = parameters_[factored.weight];
  const FactoredLayer::Settings settings = weight.layer->settings();
  const std::shared_ptr<FactoredLayer> left = weight.layer;
  if (left->kind() == FactoredLayer::Kind::kEmbedding) {
    weight.layer = NewTable(weight);
  } else {
    weight.layer = NewLayer(weight);
  }
  weight.layer->InheritProfile(*left);
  weight.layer->accumulator = left->accumulator.load();
  weight.layer->StartCapture(settings);
  RegisterLayer(weight.layer, weak_from_this());
  factored.exchange = NewSfbExchange(factored);
}

// What spoke against a layer may be gone later: an odd step, such as one under a profiler, or one that overflowed. So
// it is looked at again, each time after twice as many plans.
void Session::Refuse(Parameter& weight) {
  constexpr int kMostDoublings = 16;
  weight.retry_plan = schedule_.plans() + (int64_t{1} << std::min(weight.refusals, kMostDoublings));
  ++weight.refusals;
}

// In the step after which a plan is due.
void Session::LookAgain() {
  if (!planned_ || !schedule_.DueWithin(1)) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    if (!p.layer || !p.active || p.refusals == 0 || schedule_.plans() + 1 < p.retry_plan) continue;
    if (p.layer->mode() != FactoredLayer::Mode::kBypass) continue;
    p.layer->set_mode(FactoredLayer::Mode::kProfile);
    p.layer->RestartProfile();
    profiled_.push_back(p.layer);
  }
}

void Session::StopFactored(int weight_index, const std::string& reason) {
  Parameter& weight = parameters_[weight_index];
  RemoveFactored(weight_index);
  ForgetSteps();
  weight.layer->Object(reason);
  Refuse(weight);
  plan_.decisions[weight_index].reason = reason;
  warnings_.push_back(weight.name + ": " + reason + ". It uses " +
                      (weight.sparse ? "Horovod's sparse allgather" : "allreduce") +
                      " from now on, on all ranks, until a later plan finds that cause gone.");
}

void Session::RemoveFactored(int weight_index) {
  Parameter& weight = parameters_[weight_index];
  weight.layer->set_mode(FactoredLayer::Mode::kBypass);
  weight.layer->DropStep();
  weight.layer_weight = -1;
  plan_.decisions[weight_index].scheme = weight.sparse ? Scheme::kSparseAllgather : Scheme::kAllreduce;
  const auto it =
      std::find_if(factored_.begin(), factored_.end(), [&](const Factored& f) { return f.weight == weight_index; });
  DecideBias(*it, Scheme::kAllreduce);
  factored_.erase(it);
}

}  // namespace poseidon
