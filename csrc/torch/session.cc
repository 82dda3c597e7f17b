#include "torch/session.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "torch/owners.h"
#include "torch/routes/factors_route.h"
#include "torch/routes/grad_place.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

namespace ag = torch::autograd;

// Horovod's words, and what it leaves out.
Status TooManyPasses(const std::string& name) {
  return Status::Assertion(
      "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
      "backward_passes_per_step to accumulate gradients locally. (Of " +
      name + ". A layer that is called more than once inside torch.utils.checkpoint needs use_reentrant=False.)");
}

Status CameTooLate(const std::string& name) {
  return Status::Assertion(
      "The gradient of " + name +
      " came after this rank had told the others that it has none in this step: backward() had left it out where "
      "earlier steps had it, and then a collective of the script's own waited for ranks that wait for that gradient. "
      "Run the collective after the step's last backward(), or set reduce_in=\"step\".");
}

// Runs after every execution of a parameter's gradient accumulator, also when the gradient is undefined because it was
// captured.
class AccumulatorHook final : public ag::FunctionPostHook, public OwnHook {
 public:
  AccumulatorHook(std::weak_ptr<Session> session, int index) : session_(std::move(session)), index_(index) {}
  ag::variable_list operator()(const ag::variable_list& outputs, const ag::variable_list& inputs) override {
    if (InForkedChild()) return outputs;  // its gradients stay its own
    if (auto session = session_.lock()) session->OnAccumulated(index_, inputs.empty() ? at::Tensor() : inputs[0]);
    return outputs;
  }
  // Compiled autograd asks this before it traces. No `override`: the signature has changed between PyTorch's versions.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "poseidon_hvd does not support compiled autograd. Compile the model with torch.compile "
                                "and leave compiled autograd off, or use horovod.torch's DistributedOptimizer.");
  }

 private:
  const std::weak_ptr<Session> session_;
  const int index_;
};

}  // namespace

std::shared_ptr<Session> Session::Create(std::shared_ptr<Engine> engine, SessionOptions options) {
  std::shared_ptr<Session> session(new Session(std::move(engine), std::move(options)));
  std::lock_guard<std::mutex> lock(session->mutex_);
  session->context_.owner = session;
  session->Attach();
  const SessionOptions& made = session->options_;
  NameSession(session.get(), made.tag + " (of " + std::to_string(made.params.size()) + " parameters, the first is " +
                                 (made.names.empty() ? "none" : made.names.front()) + ")");
  return session;
}

namespace {

std::vector<Parameter> MakeParameters(const SessionOptions& options, const Session* session) {
  std::vector<Parameter> parameters(options.params.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& p = parameters[i];
    p.index = static_cast<int>(i);
    p.tensor = options.params[i];
    p.name = options.names[i];
    p.counter = PassCounter(options.passes_per_step);
    p.hooked = !options.hooked.empty() && options.hooked[i];
    p.own = OwnParameter(p.tensor, session);
  }
  return parameters;
}

}  // namespace

Session::Session(std::shared_ptr<Engine> engine, SessionOptions options)
    : options_(std::move(options)),
      context_(std::move(engine), options_),
      parameters_(MakeParameters(options_, this)),
      progress_(parameters_, [this] { OnFirstComplete(); }),
      membership_(context_),
      evidence_(context_, parameters_),
      router_(context_, parameters_),
      network_(options_.network) {
  context_.membership = &membership_;
  context_.progress = &progress_;
  context_.clock = &clock_;
}

Session::~Session() {
  ForgetSession(this);
  ReleaseParameters(this);
  for (Parameter& p : parameters_) {
    if (p.hook.accumulator) p.hook.accumulator->del_post_hook(p.hook.key);
  }
}

// Idempotent: also notices parameters that were unfrozen, and accumulators that PyTorch replaced (module.to(dtype)).
void Session::Attach() {
  attached_ = true;
  for (Parameter& p : parameters_) {
    if (!p.tensor.requires_grad()) continue;
    Parameter::Hook& hook = p.hook;
    if (hook.accumulator && ag::impl::try_get_grad_accumulator(p.tensor) == hook.accumulator) continue;
    if (hook.accumulator) hook.accumulator->del_post_hook(hook.key);
    hook.accumulator = ag::impl::grad_accumulator(p.tensor);
    hook.key = hook.accumulator->add_post_hook(std::make_unique<AccumulatorHook>(weak_from_this(), p.index));
    if (p.candidates.layer) p.candidates.layer->accumulator = hook.accumulator.get();
    if (p.candidates.table) p.candidates.table->accumulator = hook.accumulator.get();
    p.agreed.everywhere = p.agreed.everywhere || met_;  // unfrozen: on all ranks, until a plan knows better
    if (!std::exchange(p.active, true)) evidence_.Attach(p);
  }
  progress_.ChooseEager();
}

// Who wants a gradient may have changed since the last step.
void Session::OnFirstComplete() {
  attached_ ? progress_.ChooseEager() : Attach();
  membership_.AskWhoWants(parameters_);
}

// ---- Hooks ---------------------------------------------------------------------------------------------------------

void Session::OnProfiled(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias) {
  Lock lock(mutex_);
  layer.Profile(x, d, bias);
}

void Session::OnProfiled(EmbeddingLayer& layer, const TableRows& rows) {
  Lock lock(mutex_);
  layer.Profile(rows);
}

bool Session::OnCaptured(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d) {
  Lock lock(mutex_);
  return Capture(layer, x.scalar_type(), [&](bool last_pass) { layer.Append(x, d, CurrentWalk(), last_pass); });
}

bool Session::OnCaptured(EmbeddingLayer& layer, const TableRows& rows) {
  Lock lock(mutex_);
  return Capture(layer, rows.d.scalar_type(), [&](bool last_pass) { layer.Append(rows, CurrentWalk(), last_pass); });
}

void Session::OnDeclined(FactoredLayer& layer) {
  Lock lock(mutex_);
  layer.ShowHeldRows();
}

void Session::OnUnattached() {
  Lock lock(mutex_);
  Attach();
}

bool Session::Capture(FactoredLayer& layer, at::ScalarType type, const std::function<void(bool)>& append) {
  FactorsRoute* route = layer.route;
  if (route == nullptr) return false;  // a graph from before Reset
  if (!layer.Accepts(type)) return false;
  Parameter& weight = *route->members().front();
  AdmitPass(weight, /*cleared=*/!weight.tensor.grad().defined());
  if (weight.counter.sent() || weight.counter.remaining() <= 0) Throw(TooManyPasses(weight.name));
  FollowMembership(/*gradient_is_complete=*/weight.counter.remaining() == 1);
  if (route->OnCall(CurrentWalk(), append)) {
    context_.NoteReady(route->members());
    NoteProgress();
  }
  return true;
}

// cleared: the gradient that backward() has reduced is gone, so the user has discarded that step.
void Session::AdmitPass(Parameter& p, bool cleared) {
  if (p.step.collected && cleared) DiscardLocked();
  if (p.step.sent_without) Throw(CameTooLate(p.name));
}

void Session::OnAccumulated(int index, const at::Tensor& incoming) {
  Lock lock(mutex_);
  Parameter& p = parameters_[index];
  const at::Tensor& grad = p.tensor.grad();
  if (grad.defined() && grad.requires_grad()) {
    Throw(Status::Assertion("The gradient of " + p.name +
                            " requires a gradient itself (backward with create_graph=True), so it cannot "
                            "be reduced in place. Use torch.autograd.grad for the inner gradient."));
  }
  const bool fresh =
      incoming.defined() && grad.defined() && !grad.is_sparse() && !incoming.is_sparse() && incoming.is_alias_of(grad);
  AdmitPass(p, /*cleared=*/fresh);
  const PassCounter::Event event = p.counter.OnPass();
  if (event == PassCounter::Event::kTooMany) Throw(TooManyPasses(p.name));
  const bool complete = event == PassCounter::Event::kReady;
  FollowMembership(complete);
  if (p.route->OnPass(p, CurrentWalk())) return NoteProgress();
  if (!complete) return;
  context_.NoteReady({&p});
  evidence_.Check(p);
  if (p.hooked) RunHook(p, &lock);
  // A sparse gradient is sent when it is known that all ranks treat it so; one that another optimizer has too, in
  // Synchronize().
  p.step.sparse = grad.defined() && grad.is_sparse() && !options_.sparse_as_dense && !p.route->makes_dense();
  if (!p.step.sparse && p.own) p.route->OnComplete(p, fresh);
  NoteProgress();
}

// The user's hook before reduction. Without the lock, because the hook may ask the optimizer something. It has run once
// it has ended: after an exception Synchronize() tries again, so that no gradient is sent that it has not seen.
void Session::RunHook(Parameter& p, Lock* lock) {
  const at::Tensor grad = p.tensor.grad();
  if (p.step.hook_ran || !grad.defined()) return;
  lock->unlock();
  options_.before(p.index, grad);
  lock->lock();
  p.step.hook_ran = true;
}

// ---- Who takes part ------------------------------------------------------------------------------------------------

// Depends on agreed values alone, which do not change within a step before Synchronize().
bool Session::NeedsAllRanks() const { return PlanIsDue() || context_.gathers; }

// From every hook: asks, and sends what was held for the answer.
void Session::FollowMembership(bool gradient_is_complete) {
  if (!options_.uneven_steps) return;
  if (gradient_is_complete && NeedsAllRanks()) membership_.Ask();
  membership_.Read();
  if (membership_.Known()) router_.ForEach([](Route& route) { route.OnMembership(); });
}

void Session::WaitForMembers(Lock* lock) {
  if (options_.uneven_steps && (membership_.asked() || NeedsAllRanks())) membership_.Wait(lock);
}

void Session::CheckWhoWants(Lock* lock) {
  membership_.AskWhoWants(parameters_);
  if (!membership_.WantsDiffer(lock)) return;
  MergedProfile merged;
  const Status status = GatherProfiles("differ", &merged);  // says which parameter, on all ranks
  if (status.code() == StatusCode::kInvalidArgument) ThrowIfError(status);
  context_.ThrowIfFailed(status);
}

double Session::SumOverRanks(const std::string& what, double value) {
  const Status status = poseidon::SumOverRanks(*context_.engine, context_.WireName("agree", what), options_.process_set,
                                               options_.size, &value);
  Lock lock(mutex_);
  context_.ThrowIfFailed(status);
  return value;
}

// ---- In backward() -------------------------------------------------------------------------------------------------

// A gradient may have become complete.
void Session::NoteProgress() {
  if (!options_.reduce_in_backward || options_.size <= 1) return;
  const bool complete =
      met_ ? progress_.any_eager() && progress_.all_eager_complete() : progress_.complete() > 0 && !tried_to_meet_;
  if (complete) walk_end_.Queue(weak_from_this());
}

void Session::OnOuterWalk() {
  Lock lock(mutex_);
  walk_end_.Queue(weak_from_this());
}

void Session::OnWalkEnd() {
  bool python = false;
  {
    Lock lock(mutex_);
    if (walk_end_.FollowOuterWalk(weak_from_this())) return;
    python = hooks_after_;
  }
  python ? options_.reduce() : static_cast<void>(ReduceInBackward());
}

bool Session::ReduceInBackward() {
  Lock lock(mutex_);
  walk_end_.RemoveHooks();
  if (!MeetFirst(&lock) || !progress_.any_eager() || !progress_.all_eager_complete()) return false;
  if (!clock_.flushed_in_backward()) {
    NoteFlushed();
    clock_.set_flushed_in_backward();
  }
  CheckWhoWants(&lock);
  WaitForMembers(&lock);
  if (membership_.SomeRankIsMissing()) return false;  // what needs all ranks waits for Synchronize()
  SendRest(/*all=*/false);
  Collect(/*all=*/false, &lock);
  clock_.NoteReduced();
  return true;
}

// In step 0 ranks tell each other what parameters they have and which of their gradients are complete, before any of
// them waits. All do so once: at the end of the first backward that completes a gradient, or in Synchronize().
bool Session::MeetFirst(Lock* lock) {
  if (met_ || tried_to_meet_) return met_;
  tried_to_meet_ = true;
  WaitForMembers(lock);
  if (PutOffWhileRanksAreMissing()) return false;
  MergedProfile merged;
  const Status status = GatherProfiles("first", &merged);
  if (status.code() == StatusCode::kInvalidArgument) ThrowIfError(status);  // the same on all ranks
  context_.ThrowIfFailed(status);
  met_ = true;
  membership_.set_some_are_frozen(
      std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return !p.active; }));
  for (Parameter& p : parameters_) {
    const MergedTensor& tensor = merged.tensors[p.index];
    p.agreed.everywhere = tensor.everywhere;
    p.agreed.sparse = p.agreed.sparse || (tensor.everywhere && tensor.sparse);
  }
  router_.FollowSparse();
  progress_.ChooseEager();
  return true;
}

// A rank whose backward() left eager gradients out, because this batch did not use a layer, does not wait in
// backward(); the others do, for those gradients, which it sends in Synchronize(). If a collective of the script's own
// comes before that, each would wait for the other. So the rank sends now that it has none. Not if the step may bring
// more walks, as far as earlier steps tell.
void Session::NoteWait() {
  Lock lock(mutex_);
  if (!options_.reduce_in_backward || !met_ || progress_.complete() == 0 || progress_.all_eager_complete() ||
      progress_.may_bring_more_walks() || CurrentWalk() >= 0)
    return;
  std::vector<Parameter*> left_out;
  for (Parameter& p : parameters_) {
    if (!p.agreed.eager || p.counter.sent()) continue;
    if (p.counter.touched() && !p.counter.ready()) return;  // passes that may follow
    if (!p.counter.touched()) left_out.push_back(&p);
  }
  SendRest(/*all=*/false);
  for (Parameter* p : left_out) p->step.sent_without = p->counter.sent();
}

// ---- The end of a step ---------------------------------------------------------------------------------------------

void Session::Synchronize() {
  if (InForkedChild()) {
    ThrowIfError(Status::FailedPrecondition(
        "This is a forked child process, in which Horovod does not run: its gradients stay its own. Step the optimizer "
        "that was wrapped, or spawn the process instead."));
  }
  Lock lock(mutex_);
  Attach();
  if (clock_.flushed_in_backward() && progress_.any_eager_complete()) {
    clock_.NoteIdle();
  } else {
    NoteFlushed();
  }
  CheckWhoWants(&lock);
  WaitForMembers(&lock);
  // Before the agreement, in which the others wait: a hook may fail, and Synchronize() be called again.
  for (Parameter& p : parameters_) {
    if (p.hooked && p.active && !p.counter.sent()) RunHook(p, &lock);
  }
  // A first plan comes before what has not been sent, because it tells what is sparse. Later ones come when all has
  // been sent, because other ranks may wait for that within backward().
  MeetFirst(&lock);
  if (!planned_) AgreeIfDue(&lock);
  SendRest(/*all=*/true);
  if (planned_) AgreeIfDue(&lock);
  Collect(/*all=*/true, &lock);
  FinishStep();
}

void Session::NoteFlushed() {
  const bool soon = plan_clock_ + kTimedSteps > next_plan_at_;
  clock_.NoteFlushed(parameters_, {my_costs_, time_inputs_.contention, time_inputs_.copy}, GoesByTime() && soon);
}

// What has not been sent: zeros, or no rows, for what got no gradient. Of all parameters, or of eager ones.
void Session::SendRest(bool all) {
  for (Parameter& p : parameters_) {
    if (p.active && !p.counter.sent() && (all || p.agreed.eager)) p.route->Flush(p);
  }
}

// Waits for the exchanges of eager parameters, or of all, without the lock: other threads may run backward meanwhile.
void Session::Collect(bool all, Lock* lock) {
  const auto chosen = [&](const Parameter& p) {
    return p.counter.sent() && !p.step.collected && (all || p.agreed.eager);
  };
  std::vector<std::shared_ptr<Exchange>> waited;
  for (const Sent& each : context_.in_flight) {
    const bool wanted =
        std::all_of(each.members.begin(), each.members.end(), [&](const Parameter* p) { return chosen(*p); });
    if (all || wanted) waited.push_back(each.exchange);
  }
  std::vector<Parameter*> todo;
  for (Parameter& p : parameters_) {
    if (chosen(p)) todo.push_back(&p);
  }
  double waited_seconds[kSchemeCount] = {};
  const Clock::time_point begin = Clock::now();
  lock->unlock();
  const Status status = context_.engine->Wait(waited, waited_seconds);
  lock->lock();
  SessionStats& stats = context_.stats;
  stats.synchronize_seconds += SecondsBetween(begin, Clock::now());
  for (size_t scheme = 0; scheme < stats.by_scheme.size(); ++scheme)
    stats.by_scheme[scheme].waited_seconds += waited_seconds[scheme];
  if (!status.ok()) {
    AbandonStep();
    context_.ThrowIfFailed(status);
  }
  const auto was_waited_for = [&](const Sent& each) {
    return std::find(waited.begin(), waited.end(), each.exchange) != waited.end();
  };
  for (const Sent& each : context_.in_flight) {
    if (!was_waited_for(each)) continue;
    stats.of(each.exchange->scheme()).Add(each.exchange->times(), each.exchange->wire(), each.exchange->gradients());
    clock_.NoteDone(each.exchange->times());
  }
  std::vector<Sent>& in_flight = context_.in_flight;
  in_flight.erase(std::remove_if(in_flight.begin(), in_flight.end(), was_waited_for), in_flight.end());
  for (Parameter* p : todo) {
    p->step.collected = true;
    const Status finished = p->route->Finish(*p);
    if (gradient_error_.ok()) gradient_error_ = finished;  // thrown at the end of the step, when nothing is in flight
  }
}

void Session::FinishStep() {
  std::vector<std::pair<Parameter*, std::string>> objections;
  if (!membership_.SomeRankIsMissing()) {
    for (Parameter& p : parameters_) {
      if (p.route->members().front() != &p || !p.counter.sent()) continue;
      p.route->CountStep(&context_.stats);
      const std::string objection = p.route->Objection();
      if (!objection.empty()) objections.emplace_back(&p, objection);
    }
  }
  for (const Parameter& p : parameters_) {  // reduced in backward(), and then taken away
    if (gradient_error_.ok() && p.step.collected && !p.tensor.grad().defined())
      gradient_error_ = GradientRemoved(p.name);
  }
  progress_.NoteEndOfWalks();
  NoteRows();
  if (GoesByTime() && !membership_.SomeRankIsMissing()) clock_.RecordStep(planned_);
  const Status error = std::exchange(gradient_error_, Status::OK());
  EndStep();
  const int64_t step = context_.stats.steps++;
  ++plan_clock_;
  // All ranks read the same flags, so all of them stop here or none.
  for (const auto& [p, objection] : objections) {
    if (!router_.HasOwnScheme(*p)) continue;  // a new plan has just made it dense
    GiveUp(*p, objection + " in step " + std::to_string(step));
  }
  if (planned_ && plan_clock_ >= next_plan_at_) evidence_.LookAgain(plans_ + 1);
  progress_.ChooseEager();
  if (membership_.some_are_frozen()) {
    membership_.set_some_are_frozen(
        std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return !p.active; }));
  }
  if (!error.ok()) context_.ThrowIfFailed(error);
}

void Session::EndStep() {
  context_.in_flight.clear();
  for (Parameter& p : parameters_) {
    p.counter.Reset();
    p.step = {};
  }
  evidence_.EndStep();
  progress_.EndStep();
  membership_.EndStep();
  router_.EndStep();
  tried_to_meet_ = attached_ = false;
  gradient_error_ = Status::OK();
  if (std::exchange(adopt_next_plan_, false)) AdoptPlan();
  evidence_.Restart(planned_);
  clock_.EndStep();
}

void Session::AbandonStep() {
  router_.Abandon();
  adopt_next_plan_ = false;
  EndStep();
}

void Session::Reset() {
  // What is under way on all ranks ends by itself, and then its names are free again. After a failure it ends too, by
  // Horovod's shutdown. Whatever does not end in time is left to its exchange.
  constexpr double kPatienceSeconds = 5;
  Lock lock(mutex_);
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (const Sent& each : context_.in_flight) exchanges.push_back(each.exchange);
  lock.unlock();
  context_.engine->WaitFor(exchanges, kPatienceSeconds);
  lock.lock();
  AbandonStep();
}

bool Session::Discard() {
  Lock lock(mutex_);
  return DiscardLocked();
}

bool Session::DiscardLocked() {
  const bool open = std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) {
    return !p.step.collected && (p.counter.touched() || p.counter.sent());
  });
  if (open) return false;
  EndStep();
  return true;
}

// ---- What the optimizer tells --------------------------------------------------------------------------------------

void Session::SetHooksAfter(bool any) {
  Lock lock(mutex_);
  hooks_after_ = any;
}

void Session::SetPassesPerStep(int passes) {
  Lock lock(mutex_);
  for (Parameter& p : parameters_) p.counter.SetPassesPerStep(passes);
}

void Session::NoteZeroed() {
  Lock lock(mutex_);
  clock_.NoteZeroed();
  Attach();  // parameters may have been unfrozen or converted since
}

void Session::NoteUpdated() {
  Lock lock(mutex_);
  clock_.NoteUpdated();
}

void Session::NoteJoin() {
  Lock lock(mutex_);
  plan_clock_ = 0;
  RestartPlanClock();
}

// ---- Views ---------------------------------------------------------------------------------------------------------

std::vector<int> Session::Which(bool (*wanted)(const Parameter&)) const {
  Lock lock(mutex_);
  std::vector<int> indices;
  for (const Parameter& p : parameters_) {
    if (wanted(p)) indices.push_back(p.index);
  }
  return indices;
}

std::vector<int> Session::TouchedParameters() const {
  return Which([](const Parameter& p) { return p.counter.touched() || p.counter.sent(); });
}

std::vector<int> Session::CollectedParameters() const {
  return Which([](const Parameter& p) { return p.step.collected; });
}

std::vector<int> Session::ActiveParameters() const {
  return Which([](const Parameter& p) { return p.active; });
}

std::vector<int> Session::Delays() const {
  Lock lock(mutex_);
  std::vector<int> delays;
  for (const Parameter& p : parameters_) delays.push_back(p.counter.remaining());
  return delays;
}

Plan Session::CurrentPlan() const {
  Lock lock(mutex_);
  return plan_;
}

SessionStats Session::Stats() const {
  Lock lock(mutex_);
  return context_.stats;
}

std::vector<std::string> Session::TakeWarnings() {
  Lock lock(mutex_);
  return std::exchange(warnings_, {});
}

}  // namespace poseidon
