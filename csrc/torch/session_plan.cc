// Session's part in the agreement: what every rank contributes in step 0, the plan that rank 0 makes of it, and what
// follows from it.
#include <algorithm>
#include <utility>

#include <ATen/Parallel.h>

#include "core/base/median.h"
#include "core/engine/gather_bytes.h"
#include "core/model/cost_model.h"
#include "core/model/measurements.h"
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

// which: part of the wire name. A difference that ranks cannot train with is kInvalidArgument, the same on every rank.
Status Session::GatherProfiles(const char* which, MergedProfile* merged) {
  std::vector<std::vector<uint8_t>> gathered;
  Status status = GatherBytes(*engine_, WireName("agree", which), options_.process_set, options_.size,
                              EncodeProfile(LocalProfile()), &gathered);
  if (!status.ok()) return status;
  std::vector<RankProfile> by_rank(gathered.size());
  for (size_t rank = 0; rank < gathered.size(); ++rank) {
    status = DecodeProfile(gathered[rank].data(), gathered[rank].size(), &by_rank[rank]);
    if (!status.ok()) {
      return Status::Internal("the profile of rank " + std::to_string(rank) + " cannot be read (" + status.message() +
                              "); is the same version of poseidon_hvd installed on every host?");
    }
  }
  status = MergeProfiles(by_rank, merged);  // the same verdict, and the same error, on every rank
  if (status.ok() && !planned_) status = CompareLayouts(by_rank);
  if (status.ok() && merged->tensors.size() != parameters_.size()) {
    return Status::Internal("the profiles of " + std::to_string(merged->tensors.size()) +
                            " parameters were gathered, there are " + std::to_string(parameters_.size()) +
                            "; install the same version of poseidon_hvd on every rank");
  }
  return status;
}

Status Session::AgreeOnPlan() {
  Status status = GatherProfiles("profile", &merged_profile_);
  if (status.ok() && GoesByTime() && options_.size > 1) status = Calibrate();
  return status.ok() ? ReceivePlan() : status;
}

// At the end of step 0, and whenever a later plan is made. The same on all ranks, because it depends on agreed values
// alone.
bool Session::PlanIsDue() const {
  if (!planned_) return true;
  if (options_.size <= 1 || (options_.policy == Policy::kAllreduce && !GoesByTime())) return false;
  return plan_clock_ >= next_plan_at_ || steps_of_other_rows_ >= kTuning.steps_of_other_rows;
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
  if (missing) RestartPlanClock();
  return missing;
}

void Session::RestartPlanClock() {
  next_plan_at_ = plan_clock_ + kTuning.first_revision;
  steps_of_other_rows_ = 0;
}

// That the plan in force was made for.
double Session::ExpectedRows(const Factored& factored) const {
  const MergedTensor& merged = merged_profile_.tensors[factored.weight];
  const bool table = plan_.decisions[factored.weight].scheme == Scheme::kRowSparse;
  return static_cast<double>(table ? merged.global_unique_rows : merged.global_rows);
}

// Every rank has read the same gathered rows.
void Session::NoteRows() {
  if (SomeRankIsMissing()) return;
  const bool other = std::any_of(factored_.begin(), factored_.end(), [&](const Factored& factored) {
    const double expected = ExpectedRows(factored);
    const auto rows = static_cast<double>(factored.exchange->gathered_rows());
    return rows > 0 &&
           (rows > expected * kTuning.rows_factor || rows * kTuning.rows_factor < expected);  // none: unused for now
  });
  if (other && steps_of_other_rows_ == 0) ForgetSteps();
  steps_of_other_rows_ = other ? steps_of_other_rows_ + 1 : 0;
}

// Steps from now on are not like those before. The same on all ranks.
void Session::ForgetSteps() {
  step_history_.clear();
  steps_under_plan_ = 0;
}

// Measures what policy kTime needs and has not measured yet. Collective: which network trials run depends on agreed
// values alone.
Status Session::Calibrate() {
  if (!network_.known()) {
    CalibrationOptions calibration;
    calibration.name_prefix = WireName("calibrate", "network");
    calibration.process_set = options_.process_set;
    calibration.size = options_.size;
    Status status = MeasureNetwork(*engine_, calibration, &network_);
    if (!status.ok()) return status;
  }
  my_costs_.assign(parameters_.size(), LayerCost{});
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const MergedTensor& merged = merged_profile_.tensors[i];
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
    LayerCost& cost = my_costs_[i];
    cost = calibration_.CostOf(shape);
    const double share = static_cast<double>(merged.max_rank_rows) / static_cast<double>(shape.rows);
    for (double* seconds : {&cost.local, &cost.input, &cost.pack}) *seconds *= share;
    if (!table) cost.rebuild *= static_cast<double>(gathered) / static_cast<double>(shape.global_rows);
  }
  std::vector<std::vector<uint8_t>> gathered;
  Status status = GatherBytes(*engine_, WireName("agree", "costs"), options_.process_set, options_.size,
                              EncodeCosts({calibration_.Contention(), calibration_.Copy(), my_costs_}), &gathered);
  if (!status.ok()) return status;
  std::vector<ComputeCosts> by_rank(gathered.size());
  for (size_t rank = 0; rank < gathered.size(); ++rank) {
    status = DecodeCosts(gathered[rank], parameters_.size(), &by_rank[rank]);
    if (!status.ok()) return Status::Internal("rank " + std::to_string(rank) + ": " + status.message());
  }
  const ComputeCosts costs = MedianCosts(by_rank);
  measured_ = {network_, options_.network.known(), costs.contention, costs.copy, costs.layers};
  return Status::OK();
}

Status Session::ReceivePlan() {
  std::vector<uint8_t> mine;
  if (options_.rank == 0) {
    NoteTried();
    Question question{merged_profile_, measured_, WhichMayShare(), UnusedButFactored(), stats_.steps};
    ChooserSettings settings{options_.policy,
                             {options_.size, wire_format_},
                             options_.overrides,
                             options_.dense,
                             options_.gather_memory_bytes};
    Plan plan = Choose(question, settings, &trials_);
    plan.reconstruct_threads = at::get_num_threads();
    // The optimizer's own step follows, whatever the choice.
    for (StepEstimate* estimate : {&plan.prediction.chosen, &plan.prediction.dense}) {
      estimate->step += update_seconds_;
      estimate->compute += update_seconds_;
    }
    mine = EncodePlan(plan);
  }
  std::vector<std::vector<uint8_t>> gathered;
  Status status =
      GatherBytes(*engine_, WireName("agree", "plan"), options_.process_set, options_.size, mine, &gathered);
  if (!status.ok()) return status;
  status = DecodePlan(gathered[0].data(), gathered[0].size(), &next_plan_);
  if (!status.ok()) return Status::Internal("the plan of rank 0 cannot be read: " + status.message());

  std::vector<LocalTensor> local;
  for (const Parameter& p : parameters_) local.push_back({p.name, p.tensor.sizes().vec()});
  status = CheckPlan(next_plan_, options_.size, local);
  if (!status.ok()) return status;
  const uint64_t hash = HashPlan(gathered[0], local);
  std::vector<uint8_t> hash_bytes(sizeof(hash));
  for (size_t i = 0; i < sizeof(hash); ++i) hash_bytes[i] = static_cast<uint8_t>(hash >> (8 * i));
  status = GatherBytes(*engine_, WireName("agree", "hash"), options_.process_set, options_.size, hash_bytes, &gathered);
  if (!status.ok()) return status;
  for (size_t rank = 1; rank < gathered.size(); ++rank) {
    if (gathered[rank] == gathered[0]) continue;
    return Status::InvalidArgument(
        "Ranks 0 and " + std::to_string(rank) +
        " hold different communication plans, so they would wait for each other for ever. All ranks must build the "
        "same model and wrap the same parameters in the same order.");
  }

  adopt_next_plan_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!planned_) parameters_[i].sparse = merged_profile_.tensors[i].sparse;
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

// The choice in force has been observed. Once rows are others than those that choices were tried with, all that is
// forgotten.
void Session::NoteTried() {
  if (!GoesByTime()) return;
  if (steps_of_other_rows_ >= kTuning.steps_of_other_rows) trials_.Forget();
  trials_.Observe(plan_.decisions, plan_.slices, merged_profile_.step_seconds, steps_under_plan_);
}

// A layer that nobody used in this step says nothing of the next one: it stays what it is.
std::vector<const TensorDecision*> Session::UnusedButFactored() const {
  std::vector<const TensorDecision*> kept(parameters_.size());
  for (size_t i = 0; i < plan_.decisions.size(); ++i) {
    const bool factored = parameters_[i].layer_weight == static_cast<int>(i);
    if (factored && merged_profile_.tensors[i].global_rows == 0) kept[i] = &plan_.decisions[i];
  }
  return kept;
}

void Session::AdoptPlan() {
  ++plans_;
  next_plan_at_ =
      std::max(kTuning.first_revision, std::min(2 * plan_clock_ + 2, plan_clock_ + kTuning.most_steps_between_plans));
  if (steps_of_other_rows_ >= kTuning.steps_of_other_rows) plan_changes_ = 0;
  steps_of_other_rows_ = 0;
  bool changed = false;  // and so tried; what is decided by given values needs no trial
  for (size_t i = 0; i < parameters_.size(); ++i) {
    changed =
        changed || (parameters_[i].layer_weight == static_cast<int>(i)) != IsFactored(next_plan_.decisions[i].scheme);
  }
  if (planned_ && changed && merged_profile_.step_seconds > 0) {  // the more often, the longer until the next
    next_plan_at_ = std::min(next_plan_at_, plan_clock_ + kTuning.steps_of_trial * ++plan_changes_);
  }
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
    const MergedTensor& merged = merged_profile_.tensors[i];
    p.sparse = merged.sparse;
    p.everywhere = merged.everywhere;
    ChooseCandidate(p, merged.base);
    if (!merged.sfb_allowed && merged.base.used && plans_ >= p.retry_plan) Refuse(p);
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
  const TensorProfile& profile = merged_profile_.tensors[weight_index].base;
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
  weight.retry_plan = plans_ + (int64_t{1} << std::min(weight.refusals, kMostDoublings));
  ++weight.refusals;
}

// In the step after which a plan is due.
void Session::LookAgain() {
  if (!planned_ || plan_clock_ < next_plan_at_) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    if (!p.layer || !p.active || p.refusals == 0 || plans_ + 1 < p.retry_plan) continue;
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
