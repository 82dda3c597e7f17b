#include "torch/planning.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "core/engine/scalar_sum.h"
#include "torch/dtypes.h"
#include "torch/routes/grad_place.h"
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

Planning::Planning(const Parts& parts)
    : context_(parts.context),
      parameters_(parts.parameters),
      evidence_(parts.evidence),
      router_(parts.router),
      clock_(parts.clock),
      membership_(parts.membership),
      agreement_(MakeAgreement()) {}

// ---- What this rank contributes ------------------------------------------------------------------------------------

// Its callbacks run while the session waits for other ranks, without the lock.
Agreement Planning::MakeAgreement() {
  const SessionOptions& session = context_.options;
  Agreement::Options options;
  options.prefix = "poseidon." + session.tag;
  options.process_set = session.process_set;
  options.rank = session.rank;
  options.chooser = {session.policy,
                     {session.size, context_.wire_format},
                     session.overrides,
                     session.dense,
                     session.gather_memory_bytes};
  options.network = session.network;
  Agreement::Local local;
  local.tensors = [this] {
    std::vector<LocalTensor> tensors;
    for (const Parameter& p : parameters_) tensors.push_back({p.name, p.tensor.sizes().vec()});
    return tensors;
  };
  local.profile = [this] {
    Lock lock(context_.mutex);
    return LocalProfile();
  };
  local.costs = [this](const MergedProfile& merged) { return MeasureCosts(merged); };
  local.question = [this](const MergedProfile& merged, Question* question) {
    Lock lock(context_.mutex);
    Ask(merged, question);
  };
  return Agreement(context_.engine.get(), std::move(options), std::move(local));
}

RankProfile Planning::LocalProfile() const {
  const SessionOptions& options = context_.options;
  RankProfile profile;
  profile.settings_text = options.settings;
  profile.settings_hash = HashBytes(options.settings.data(), options.settings.size());
  profile.compute_seconds = clock_.compute_seconds();
  if (!options.network.known()) {  // a given network is taken at its word
    profile.step_seconds = clock_.step_seconds();
    profile.first_step_seconds = clock_.first_step_seconds();
  }
  profile.tensors = evidence_.Profiles();
  return profile;
}

// What this rank's processor takes for the layers that may be factored.
ComputeCosts Planning::MeasureCosts(const MergedProfile& profile) {
  ComputeCosts costs;
  costs.layers.resize(parameters_.size());
  for (const Parameter& p : parameters_) {
    const MergedTensor& merged = profile.tensors[p.index];
    if (!merged.sfb_allowed || merged.global_rows == 0 || p.tensor.dim() != 2) continue;
    const bool table = merged.base.is_embedding;
    const int64_t gathered = table ? merged.global_unique_rows : merged.global_rows;
    // Rounded, so that rows that vary a little from plan to plan are not measured anew.
    LayerShape shape;
    shape.table = table;
    shape.out_features = p.tensor.size(0);
    shape.in_features = p.tensor.size(1);
    shape.rows = RoundUp(merged.max_rank_rows);
    shape.global_rows = RoundUp(gathered);
    shape.ranks = context_.options.size;
    shape.gradient = GradType(p.tensor);
    shape.wire = ToScalarType(context_.wire_format.Gathered(merged.base.factor_dtype));
    LayerCost& cost = costs.layers[p.index];
    cost = calibration_.CostOf(shape);
    const double share = static_cast<double>(merged.max_rank_rows) / static_cast<double>(shape.rows);
    for (double* seconds : {&cost.local, &cost.input, &cost.pack}) *seconds *= share;
    if (!table) cost.rebuild *= static_cast<double>(gathered) / static_cast<double>(shape.global_rows);
  }
  costs.contention = calibration_.Contention();
  costs.copy = calibration_.Copy();
  return costs;
}

bool Planning::MayShare(const Parameter& p) const {
  const SessionOptions& options = context_.options;
  const auto has = [&](const std::vector<int>& group) {
    return std::find(group.begin(), group.end(), p.index) != group.end();
  };
  return std::none_of(options.groups.begin(), options.groups.end(), has) && !p.agreed.sparse &&
         options.compression != CompressionKind::kPython && at::isFloatingType(p.tensor.scalar_type()) &&
         p.tensor.numel() > 0;
}

void Planning::Ask(const MergedProfile& profile, Question* question) const {
  for (const Parameter& p : parameters_) {
    const MergedTensor& merged = profile.tensors[p.index];
    // A gradient that some rank does not complete in backward would keep those that share its message from being
    // reduced there.
    const bool in_backward = merged.everywhere || !context_.options.reduce_in_backward;
    question->may_share.push_back(MayShare(p) && !merged.sparse && in_backward);
    // A layer that nobody used in this step says nothing of the next one: it stays what it is.
    const bool stays = planned_ && router_.HasOwnScheme(p) && merged.global_rows == 0;
    question->kept.push_back(stays ? &plan_.decisions[p.index] : nullptr);
  }
  question->step = context_.stats.steps;
  question->reconstruct_threads = at::get_num_threads();
  question->update_seconds = clock_.update_seconds();
}

void Planning::NoteFlushed() {
  const Measured& measured = agreement_.measured();
  const bool soon = schedule_.DueWithin(kTimedSteps);
  clock_.NoteFlushed(parameters_, {agreement_.my_costs(), measured.contention, measured.copy}, GoesByTime() && soon);
}

// ---- What ranks do together ----------------------------------------------------------------------------------------

void Planning::GatherProfiles(const char* which, MergedProfile* merged) {
  Status status;
  {
    Unlocked unlocked(context_.mutex);
    status = agreement_.GatherProfiles(which, /*first=*/!planned_, merged);
  }
  if (status.code() == StatusCode::kInvalidArgument) ThrowIfError(status);  // the same on all ranks
  context_.ThrowIfFailed(status);
}

bool Planning::Meet() {
  if (PutOffWhileRanksAreMissing()) return false;
  MergedProfile merged;
  GatherProfiles("first", &merged);
  met_ = true;
  for (Parameter& p : parameters_) {
    const MergedTensor& tensor = merged.tensors[p.index];
    p.agreed.everywhere = tensor.everywhere;
    p.agreed.sparse = p.agreed.sparse || (tensor.everywhere && tensor.sparse);
  }
  router_.FollowSparse();
  return true;
}

void Planning::TellDifference() {
  MergedProfile merged;
  GatherProfiles("differ", &merged);
}

bool Planning::Due() const {
  if (!planned_) return true;
  const SessionOptions& options = context_.options;
  if (options.size <= 1 || (options.policy == Policy::kAllreduce && !GoesByTime())) return false;
  return schedule_.Due();
}

// Ranks that have joined take part in allreduces only, so while there are such a plan that needs none of them now is
// kept; the first plan is put off step by step.
bool Planning::PutOffWhileRanksAreMissing() {
  const SessionOptions& options = context_.options;
  bool missing = membership_.SomeRankIsMissing();
  if (!options.uneven_steps) {
    double ranks = 1;
    Status status;
    {
      Unlocked unlocked(context_.mutex);
      status =
          SumOverRanks(*context_.engine, context_.WireName("agree", "live"), options.process_set, options.size, &ranks);
    }
    context_.ThrowIfFailed(status);
    missing = ranks < options.size;
  }
  if (missing) schedule_.PutOff();
  return missing;
}

void Planning::AgreeIfDue() {
  if (!Due() || PutOffWhileRanksAreMissing()) return;
  evidence_.CheckIncomplete();
  const Plan in_force = plan_;
  const int64_t steps = clock_.steps_under_plan();
  Plan next;
  Status status;
  {
    Unlocked unlocked(context_.mutex);
    status = agreement_.Agree(in_force, steps, schedule_.rows_have_changed(), &next);
  }
  if (status.code() == StatusCode::kInvalidArgument) ThrowIfError(status);  // the same on all ranks
  context_.ThrowIfFailed(status);
  next_plan_ = std::move(next);
  adopt_next_plan_ = true;
  if (planned_) return;
  for (Parameter& p : parameters_) {
    p.agreed.sparse = agreement_.profile().tensors[p.index].sparse;
    const TensorDecision& decision = next_plan_.decisions[p.index];
    if (decision.request_refused) warnings_.push_back(decision.name + ": " + decision.reason + ".");
  }
  router_.FollowSparse();
  if (next_plan_.reconstruct_threads != at::get_num_threads()) {
    warnings_.push_back(
        "this rank computes with " + std::to_string(at::get_num_threads()) + " threads and rank 0 with " +
        std::to_string(next_plan_.reconstruct_threads) +
        ": gradients rebuilt from factors may differ in the last bits between them. Set OMP_NUM_THREADS alike.");
  }
}

// ---- What follows --------------------------------------------------------------------------------------------------

void Planning::EndStep(bool abandoned) {
  if (std::exchange(adopt_next_plan_, false) && !abandoned) Adopt();
}

void Planning::Adopt() {
  // And so tried; what is decided by given values needs no trial.
  const bool changed = std::any_of(parameters_.begin(), parameters_.end(),
                                   [&](const Parameter& p) { return router_.Changes(p, next_plan_); });
  schedule_.Made(/*trial=*/planned_ && changed && agreement_.profile().step_seconds > 0);
  const bool same_slices = plan_.slices == next_plan_.slices && plan_.dense_method == next_plan_.dense_method;
  clock_.NoteNewPlan(!planned_ || changed || !same_slices);
  clock_.ForgetSteps();
  plan_ = std::move(next_plan_);
  planned_ = true;
  const MergedProfile& profile = agreement_.profile();
  for (Parameter& p : parameters_) {
    const MergedTensor& merged = profile.tensors[p.index];
    p.agreed.sparse = merged.sparse;
    p.agreed.everywhere = merged.everywhere;
    evidence_.Follow(p, merged, schedule_.plans());
  }
  router_.Follow(plan_, profile);
  for (const Parameter& p : parameters_) {
    if (router_.HasOwnScheme(p)) DecideMembers(*p.route);
    evidence_.BypassUnlessCaptured(p);
  }
}

// Those that travel along, such as a bias, have no scheme of their own.
void Planning::DecideMembers(const Route& route) {
  const Parameter& first = *route.members().front();
  const TensorDecision& lead = plan_.decisions[first.index];
  const bool along = lead.scheme != Scheme::kAllreduce;
  for (const Parameter* p : route.members()) {
    if (p == &first) continue;
    TensorDecision& decision = plan_.decisions[p->index];
    decision.Remove(decision.scheme == Scheme::kAllreduce ? lead.scheme : decision.scheme);
    decision.scheme = lead.scheme;
    decision.global_rows = lead.global_rows;
    if (along) decision.Put({lead.scheme, 0, -1, ""});
    decision.reason = "follows " + first.name;
  }
}

void Planning::GiveUp(Parameter& p, const std::string& reason) {
  const std::shared_ptr<Route> route = p.route;
  router_.GiveUp(p);
  TensorDecision& decision = plan_.decisions[p.index];
  decision.scheme = Scheme::kAllreduce;
  DecideMembers(*route);
  if (p.agreed.sparse) decision.scheme = Scheme::kSparseAllgather;
  decision.reason = reason;
  clock_.ForgetSteps();
  evidence_.Object(p, reason, schedule_.plans());
  warnings_.push_back(p.name + ": " + reason + ". It uses " +
                      (p.agreed.sparse ? "Horovod's sparse allgather" : "allreduce") +
                      " from now on, on all ranks, until a later plan finds that cause gone.");
}

// That the plan in force was made for.
double Planning::ExpectedRows(const Parameter& p) const {
  const MergedTensor& merged = agreement_.profile().tensors[p.index];
  return static_cast<double>(merged.base.is_embedding ? merged.global_unique_rows : merged.global_rows);
}

// Every rank has read the same gathered rows.
void Planning::NoteRows() {
  const bool other = std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& p) {
    if (!router_.HasOwnScheme(p) || p.route->GatheredRows() < 0) return false;
    return schedule_.AreOtherRows(static_cast<double>(p.route->GatheredRows()), ExpectedRows(p));
  });
  if (schedule_.NoteRows(other)) clock_.ForgetSteps();
}

void Planning::FinishStep(const std::vector<Objection>& objections) {
  const int64_t step = context_.stats.steps++;
  schedule_.Tick();
  // All ranks read the same flags, so all of them stop here or none.
  for (const Objection& each : objections) {
    if (!router_.HasOwnScheme(*each.parameter)) continue;  // a new plan has just made it dense
    GiveUp(*each.parameter, each.reason + " in step " + std::to_string(step));
  }
  if (planned_ && schedule_.DueWithin(1)) evidence_.LookAgain(schedule_.plans() + 1);
}

}  // namespace poseidon
