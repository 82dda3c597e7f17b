// Session's part in the agreement: what every rank contributes in step 0, the plan that rank 0 makes of it, and what
// follows from it.
#include <algorithm>
#include <utility>

#include <ATen/Parallel.h>

#include "core/engine/gather_bytes.h"
#include "core/model/cost_model.h"
#include "core/model/measurements.h"
#include "core/plan/dense_choice.h"
#include "torch/dtypes.h"
#include "torch/routes/grad_place.h"
#include "torch/routes/registry.h"
#include "torch/session.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

// A plan is looked at again after steps that ran under it, then ever more seldom.
constexpr int64_t kFirstRevision = 3;
constexpr int64_t kMostStepsBetweenPlans = 64;
constexpr int64_t kStepsOfTrial = 4;      // after which a choice that took another's place is compared with it
constexpr double kRememberedSeconds = 1;  // of a choice's earlier steps weigh against those seen last
// Rows beyond this factor of what the plan expects, for so many steps in a row, bring the next plan forward. A short
// last batch of an epoch does not.
constexpr double kRowsFactor = 2;
constexpr int kStepsOfOtherRows = 4;

// To three significant bits.
int64_t RoundUp(int64_t rows) {
  int64_t step = 1;
  while (rows / step > 7) step *= 2;
  return (rows + step - 1) / step * step;
}

}  // namespace

RankProfile Session::LocalProfile() const {
  RankProfile profile;
  profile.settings_text = options_.settings;
  profile.settings_hash = HashBytes(options_.settings.data(), options_.settings.size());
  profile.compute_seconds = clock_.compute_seconds();
  if (!options_.network.known()) {  // a given network is taken at its word
    profile.step_seconds = clock_.step_seconds();
    profile.first_step_seconds = clock_.first_step_seconds();
  }
  profile.tensors = evidence_.Profiles();
  return profile;
}

// which: part of the wire name. A difference that ranks cannot train with is kInvalidArgument, the same on every rank.
Status Session::GatherProfiles(const char* which, MergedProfile* merged) {
  std::vector<std::vector<uint8_t>> gathered;
  Status status = GatherBytes(*context_.engine, context_.WireName("agree", which), options_.process_set, options_.size,
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
  return plan_clock_ >= next_plan_at_ || steps_of_other_rows_ >= kStepsOfOtherRows;
}

// Ranks that have joined take part in allreduces only, so while there are such a plan that needs none of them now is
// kept; the first plan is put off step by step.
bool Session::PutOffWhileRanksAreMissing() {
  bool missing = membership_.SomeRankIsMissing();
  if (!options_.uneven_steps) {
    double ranks = 1;
    context_.ThrowIfFailed(poseidon::SumOverRanks(*context_.engine, context_.WireName("agree", "live"),
                                                  options_.process_set, options_.size, &ranks));
    missing = ranks < options_.size;
  }
  if (missing) RestartPlanClock();
  return missing;
}

void Session::RestartPlanClock() {
  next_plan_at_ = plan_clock_ + kFirstRevision;
  steps_of_other_rows_ = 0;
}

// That the plan in force was made for.
double Session::ExpectedRows(const Parameter& weight) const {
  const MergedTensor& merged = merged_profile_.tensors[weight.index];
  const bool table = plan_.decisions[weight.index].scheme == Scheme::kRowSparse;
  return static_cast<double>(table ? merged.global_unique_rows : merged.global_rows);
}

// Every rank has read the same gathered rows.
void Session::NoteRows() {
  if (membership_.SomeRankIsMissing()) return;
  const bool other = std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& p) {
    if (!router_.HasOwnScheme(p)) return false;
    const double expected = ExpectedRows(p);
    const auto rows = static_cast<double>(p.route->GatheredRows());
    return rows > 0 && (rows > expected * kRowsFactor || rows * kRowsFactor < expected);  // none: unused for now
  });
  if (other && steps_of_other_rows_ == 0) clock_.ForgetSteps();
  steps_of_other_rows_ = other ? steps_of_other_rows_ + 1 : 0;
}

// Measures what policy kTime needs and has not measured yet. Collective: which network trials run depends on agreed
// values alone.
Status Session::Calibrate() {
  if (!network_.known()) {
    CalibrationOptions calibration;
    calibration.name_prefix = context_.WireName("calibrate", "network");
    calibration.process_set = options_.process_set;
    calibration.size = options_.size;
    Status status = MeasureNetwork(*context_.engine, calibration, &network_);
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
    shape.wire = ToScalarType(FactorWireDType(merged.base.factor_dtype, options_.factors_half()));
    LayerCost& cost = my_costs_[i];
    cost = calibration_.CostOf(shape);
    const double share = static_cast<double>(merged.max_rank_rows) / static_cast<double>(shape.rows);
    for (double* seconds : {&cost.local, &cost.input, &cost.pack}) *seconds *= share;
    if (!table) cost.rebuild *= static_cast<double>(gathered) / static_cast<double>(shape.global_rows);
  }
  std::vector<std::vector<uint8_t>> gathered;
  Status status =
      GatherBytes(*context_.engine, context_.WireName("agree", "costs"), options_.process_set, options_.size,
                  EncodeCosts({calibration_.Contention(), calibration_.Copy(), my_costs_}), &gathered);
  if (!status.ok()) return status;
  std::vector<ComputeCosts> by_rank(gathered.size());
  for (size_t rank = 0; rank < gathered.size(); ++rank) {
    status = DecodeCosts(gathered[rank], parameters_.size(), &by_rank[rank]);
    if (!status.ok()) return Status::Internal("rank " + std::to_string(rank) + ": " + status.message());
  }
  const ComputeCosts costs = MedianCosts(by_rank);
  time_inputs_.network = network_;
  time_inputs_.network_given = options_.network.known();
  time_inputs_.settings.gather_memory_bytes = options_.gather_memory_bytes;
  time_inputs_.contention = costs.contention;
  time_inputs_.copy = costs.copy;
  time_inputs_.costs = costs.layers;
  return Status::OK();
}

Status Session::ReceivePlan() {
  std::vector<uint8_t> mine;
  if (options_.rank == 0) {
    Plan plan;
    plan.size = options_.size;
    plan.reconstruct_threads = at::get_num_threads();
    SelectorSettings settings;
    settings.policy = options_.policy;
    settings.size = options_.size;
    settings.fp16_wire = options_.factors_half();
    plan.made_at_step = context_.stats.steps;
    const bool by_time = GoesByTime();
    if (by_time) {
      plan.network = network_;
      NoteTried();
    }
    plan.decisions =
        Select(merged_profile_, options_.overrides, settings, by_time ? &time_inputs_ : nullptr, &plan.prediction);
    time_inputs_.load = plan.prediction.load;
    KeepUnused(&plan);
    LayOutSlices(settings, &plan);
    // The optimizer's own step follows, whatever the choice.
    for (StepEstimate* estimate : {&plan.prediction.chosen, &plan.prediction.dense}) {
      estimate->step += clock_.update_seconds();
      estimate->compute += clock_.update_seconds();
    }
    mine = EncodePlan(plan);
  }
  std::vector<std::vector<uint8_t>> gathered;
  Status status = GatherBytes(*context_.engine, context_.WireName("agree", "plan"), options_.process_set, options_.size,
                              mine, &gathered);
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
  status = GatherBytes(*context_.engine, context_.WireName("agree", "hash"), options_.process_set, options_.size,
                       hash_bytes, &gathered);
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
    if (!planned_) parameters_[i].agreed.sparse = merged_profile_.tensors[i].sparse;
    const TensorDecision& decision = next_plan_.decisions[i];
    if (decision.request_refused && !planned_) warnings_.push_back(decision.name + ": " + decision.reason + ".");
  }
  if (!planned_) router_.FollowSparse();
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
  std::vector<Scheme> current;
  for (const TensorDecision& decision : plan_.decisions) current.push_back(decision.scheme);
  time_inputs_.current = current;
  time_inputs_.slices = plan_.slices;
  std::vector<TriedChoice>& tried = time_inputs_.tried;
  if (steps_of_other_rows_ >= kStepsOfOtherRows) tried.clear();
  const int64_t steps = clock_.steps_under_plan();
  if (current.empty() || merged_profile_.step_seconds <= 0 || steps == 0) return;
  auto it = std::find_if(tried.begin(), tried.end(), [&](const TriedChoice& each) { return each.schemes == current; });
  if (it == tried.end()) it = tried.insert(it, {std::move(current), 0, 0, 0});
  const double seen = merged_profile_.step_seconds * static_cast<double>(steps);
  const double before = std::min(it->total, kRememberedSeconds);
  it->seconds = (it->seconds * before + merged_profile_.step_seconds * seen) / (before + seen);
  it->total += seen;
  it->steps += steps;
}

// A layer that nobody used in this step says nothing of the next one: it stays what it is.
void Session::KeepUnused(Plan* plan) const {
  for (size_t i = 0; i < plan_.decisions.size(); ++i) {
    const bool own = router_.HasOwnScheme(parameters_[i]);
    if (own && merged_profile_.tensors[i].global_rows == 0) plan->decisions[i] = plan_.decisions[i];
  }
}

void Session::AdoptPlan() {
  ++plans_;
  next_plan_at_ = std::max(kFirstRevision, std::min(2 * plan_clock_ + 2, plan_clock_ + kMostStepsBetweenPlans));
  if (steps_of_other_rows_ >= kStepsOfOtherRows) plan_changes_ = 0;
  steps_of_other_rows_ = 0;
  // And so tried; what is decided by given values needs no trial.
  const bool changed = std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& p) {
    return router_.HasOwnScheme(p) != (FindRoute(Name(next_plan_.decisions[p.index].scheme)) != nullptr);
  });
  if (planned_ && changed && merged_profile_.step_seconds > 0) {  // the more often, the longer until the next
    next_plan_at_ = std::min(next_plan_at_, plan_clock_ + kStepsOfTrial * ++plan_changes_);
  }
  const bool same_slices = plan_.slices == next_plan_.slices && plan_.dense_method == next_plan_.dense_method;
  clock_.NoteNewPlan(!planned_ || changed || !same_slices);
  clock_.ForgetSteps();
  plan_ = std::move(next_plan_);
  planned_ = true;
  for (Parameter& p : parameters_) {
    const MergedTensor& merged = merged_profile_.tensors[p.index];
    p.agreed.sparse = merged.sparse;
    p.agreed.everywhere = merged.everywhere;
    evidence_.Follow(p, merged, plans_);
  }
  router_.Follow(plan_, merged_profile_);
  for (Parameter& p : parameters_) {
    // Calls stay registered, since a later plan may factor the layer. One without calls on this rank is profiled when
    // they come.
    const auto& layer = p.candidates.layer;
    if (!router_.HasOwnScheme(p) && layer && layer->profiled()) layer->set_mode(FactoredLayer::Mode::kBypass);
    if (router_.HasOwnScheme(p)) DecideMembers(*p.route);
  }
}

// Those that travel along, such as a bias, have no scheme of their own.
void Session::DecideMembers(const Route& route) {
  const Parameter& first = *route.members().front();
  const TensorDecision& lead = plan_.decisions[first.index];
  for (const Parameter* p : route.members()) {
    if (p == &first) continue;
    TensorDecision& decision = plan_.decisions[p->index];
    decision.scheme = lead.scheme;
    decision.global_rows = lead.global_rows;
    decision.sfb_bytes = lead.scheme == Scheme::kAllreduce ? -1 : 0;
    decision.reason = "follows " + first.name;
  }
}

void Session::GiveUp(Parameter& p, const std::string& reason) {
  const std::shared_ptr<Route> route = p.route;
  router_.GiveUp(p);
  TensorDecision& decision = plan_.decisions[p.index];
  decision.scheme = Scheme::kAllreduce;
  DecideMembers(*route);
  if (p.agreed.sparse) decision.scheme = Scheme::kSparseAllgather;
  decision.reason = reason;
  clock_.ForgetSteps();
  p.candidates.layer->Object(reason);
  evidence_.Refuse(p, plans_);
  warnings_.push_back(p.name + ": " + reason + ". It uses " +
                      (p.agreed.sparse ? "Horovod's sparse allgather" : "allreduce") +
                      " from now on, on all ranks, until a later plan finds that cause gone.");
}

void Session::AgreeIfDue(Lock*) {
  if (!PlanIsDue() || PutOffWhileRanksAreMissing()) return;
  evidence_.CheckIncomplete();
  const Status agreed = AgreeOnPlan();
  if (agreed.code() == StatusCode::kInvalidArgument) ThrowIfError(agreed);  // the same on all ranks
  context_.ThrowIfFailed(agreed);
}

// The layout, or the schemes, depend on how long things take.
bool Session::GoesByTime() const {
  if (options_.policy == Policy::kTime) return true;
  const DenseMethod method = options_.dense.method;
  return method == DenseMethod::kAuto || method == DenseMethod::kMerged || method == DenseMethod::kPriority;
}

bool Session::MayShare(const Parameter& p) const {
  const bool grouped = std::any_of(options_.groups.begin(), options_.groups.end(), [&](const std::vector<int>& group) {
    return std::find(group.begin(), group.end(), p.index) != group.end();
  });
  return !grouped && !p.agreed.sparse && options_.compression != CompressionKind::kPython &&
         at::isFloatingType(p.tensor.scalar_type()) && p.tensor.numel() > 0;
}

void Session::LayOutSlices(const SelectorSettings& settings, Plan* plan) {
  plan->dense_method = options_.dense.method;
  std::vector<bool> may_share;
  for (const Parameter& p : parameters_) {
    // A gradient that some rank does not complete in backward would keep those that share its message from being
    // reduced there.
    const MergedTensor& merged = merged_profile_.tensors[p.index];
    may_share.push_back(MayShare(p) && !merged.sparse && (merged.everywhere || !options_.reduce_in_backward));
  }
  plan->slices = ChooseLayout(merged_profile_, plan->decisions, may_share, settings, options_.dense,
                              GoesByTime() ? &time_inputs_ : nullptr, &plan->prediction);
}

}  // namespace poseidon
