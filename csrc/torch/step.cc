#include "torch/step.h"

#include <algorithm>
#include <utility>

#include "torch/layers/capture.h"
#include "torch/routes/grad_place.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

Status CameTooLate(const std::string& name) {
  return Status::Assertion(
      "The gradient of " + name +
      " came after this rank had told the others that it has none in this step: backward() had left it out where "
      "earlier steps had it, and then a collective of the script's own waited for ranks that wait for that gradient. "
      "Run the collective after the step's last backward(), or set reduce_in=\"step\".");
}

}  // namespace

// Horovod's words, and what it leaves out.
Status TooManyPasses(const std::string& name) {
  return Status::Assertion(
      "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
      "backward_passes_per_step to accumulate gradients locally. (Of " +
      name + ". A layer that is called more than once inside torch.utils.checkpoint needs use_reentrant=False.)");
}

Step::Step(const Parts& parts)
    : context_(parts.context),
      parameters_(parts.parameters),
      progress_(parts.progress),
      clock_(parts.clock),
      membership_(parts.membership),
      evidence_(parts.evidence),
      router_(parts.router),
      planning_(parts.planning) {}

bool Step::MayWait() const {
  if (!context_.options.reduce_in_backward || context_.options.size <= 1) return false;
  if (planning_.met()) return progress_.any_eager() && progress_.all_eager_complete();
  return progress_.complete() > 0 && !tried_to_meet_;
}

// ---- Before its end ------------------------------------------------------------------------------------------------

void Step::Attach() {
  attached_ = true;
  for (Parameter& p : parameters_) {
    if (!p.tensor.requires_grad()) continue;
    if (!p.hook.Attach(p.tensor, context_.hook_owner, p.index)) continue;
    const void* accumulator = p.hook.accumulator().get();
    if (p.candidates.layer) p.candidates.layer->accumulator = accumulator;
    if (p.candidates.table) p.candidates.table->accumulator = accumulator;
    p.agreed.everywhere = p.agreed.everywhere || planning_.met();  // unfrozen: on all ranks, until a plan knows better
    if (!std::exchange(p.active, true)) evidence_.Attach(p);
  }
  progress_.ChooseEager();
}

// Who wants a gradient may have changed since the last step.
void Step::OnFirstComplete() {
  attached_ ? progress_.ChooseEager() : Attach();
  membership_.AskWhoWants(parameters_);
}

// The first pass after backward() has reduced tells whether the user has discarded that step. A hook of the user's may
// hide that this parameter's gradient was gone; the others', which this pass has not reached yet, still are.
void Step::AdmitPass(Parameter& p, bool fresh) {
  if (p.step.collected && (fresh || SomeWereCleared())) Discard();
  if (p.step.sent_without) Throw(CameTooLate(p.name));
}

// Gradients that backward() has reduced are gone.
bool Step::SomeWereCleared() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const Parameter& p) { return p.step.collected && !p.tensor.grad().defined(); });
}

// The user's hook before reduction. Without the lock, because the hook may ask the optimizer something. It has run once
// it has ended: after an exception Synchronize() tries again, so that no gradient is sent that it has not seen.
void Step::RunHook(Parameter& p) {
  const at::Tensor grad = p.tensor.grad();
  if (p.step.hook_ran || !grad.defined()) return;
  {
    Unlocked unlocked(context_.mutex);
    context_.options.before(p.index, grad);
  }
  p.step.hook_ran = true;
}

// ---- Who takes part ------------------------------------------------------------------------------------------------

// Depends on agreed values alone, which do not change within a step before Synchronize().
bool Step::NeedsAllRanks() const { return planning_.Due() || context_.gathers; }

// From every hook: asks, and sends what was held for the answer.
void Step::FollowMembership(bool gradient_is_complete) {
  if (!context_.options.uneven_steps) return;
  if (gradient_is_complete && NeedsAllRanks()) membership_.Ask();
  membership_.Read();
}

void Step::WaitForRanks() {
  if (context_.options.uneven_steps && (membership_.asked() || NeedsAllRanks())) membership_.Wait();
}

void Step::WaitForMembers() {
  membership_.AskWhoWants(parameters_);
  if (membership_.WantsDiffer()) planning_.TellDifference();
  WaitForRanks();
}

// In step 0, once: at the end of the first backward that completes a gradient, or in Synchronize().
bool Step::MeetFirst() {
  if (planning_.met() || std::exchange(tried_to_meet_, true)) return planning_.met();
  WaitForRanks();
  if (!planning_.Meet()) return false;
  membership_.NoteMet();
  NoteWhoIsFrozen();
  progress_.ChooseEager();
  return true;
}

void Step::NoteWhoIsFrozen() {
  membership_.set_some_are_frozen(
      std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return !p.active; }));
}

// ---- Sending and collecting ----------------------------------------------------------------------------------------

// What has not been sent: zeros, or no rows, for what got no gradient. Of all parameters, or of eager ones.
void Step::SendRest(bool all) {
  for (Parameter& p : parameters_) {
    if (p.active && !p.counter.sent() && (all || p.agreed.eager)) p.route->Flush(p);
  }
}

// Waits for the exchanges of eager parameters, or of all, without the lock: other threads may run backward meanwhile.
void Step::Collect(bool all) {
  const auto chosen = [all](const Parameter& p) {
    return p.counter.sent() && !p.step.collected && (all || p.agreed.eager);
  };
  std::vector<Parameter*> todo;
  for (Parameter& p : parameters_) {
    if (chosen(p)) todo.push_back(&p);
  }
  const Status status = context_.Collect([&](const Parameter& p) { return all || chosen(p); });
  if (!status.ok()) {
    Abandon();
    context_.ThrowIfFailed(status);
  }
  for (Parameter* p : todo) {
    p->step.collected = true;
    const Status finished = p->route->Finish(*p);
    if (gradient_error_.ok()) gradient_error_ = finished;  // thrown at the end of the step, when nothing is in flight
  }
}

bool Step::ReduceInBackward() {
  if (!MeetFirst() || !progress_.any_eager() || !progress_.all_eager_complete()) return false;
  if (!clock_.flushed_in_backward()) {
    planning_.NoteFlushed();
    clock_.set_flushed_in_backward();
  }
  WaitForMembers();
  if (membership_.SomeRankIsMissing()) return false;  // what needs all ranks waits for Synchronize()
  SendRest(/*all=*/false);
  Collect(/*all=*/false);
  clock_.NoteReduced();
  return true;
}

// A rank whose backward() left eager gradients out, because this batch did not use a layer, does not wait in
// backward(); the others do, for those gradients, which it sends in Synchronize(). If a collective of the script's own
// comes before that, each would wait for the other. So the rank sends now that it has none. Not if the step may bring
// more walks, as far as earlier steps tell.
void Step::NoteWait() {
  if (!context_.options.reduce_in_backward || !planning_.met() || progress_.complete() == 0 ||
      progress_.all_eager_complete() || progress_.may_bring_more_walks() || CurrentWalk() >= 0)
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

void Step::Synchronize() {
  Attach();
  if (clock_.flushed_in_backward() && progress_.any_eager_complete()) {
    clock_.NoteIdle();
  } else {
    planning_.NoteFlushed();
  }
  WaitForMembers();
  // Before the agreement, in which the others wait: a hook may fail, and Synchronize() be called again.
  for (Parameter& p : parameters_) {
    if (p.hooked && p.active && !p.counter.sent()) RunHook(p);
  }
  // A first plan comes before what has not been sent, because it tells what is sparse. Later ones come when all has
  // been sent, because other ranks may wait for that within backward().
  MeetFirst();
  const bool first = !planning_.planned();
  if (first) planning_.AgreeIfDue();
  SendRest(/*all=*/true);
  if (!first) planning_.AgreeIfDue();
  Collect(/*all=*/true);
  Finish();
}

// ---- The end -------------------------------------------------------------------------------------------------------

void Step::Finish() {
  std::vector<Planning::Objection> objections;
  const bool all_here = !membership_.SomeRankIsMissing();
  for (Parameter& p : parameters_) {
    if (!all_here || p.route->members().front() != &p || !p.counter.sent()) continue;
    p.route->CountStep(&context_.stats);
    const std::string objection = p.route->Objection();
    if (!objection.empty()) objections.push_back({&p, objection});
  }
  for (const Parameter& p : parameters_) {  // reduced in backward(), and then taken away
    if (gradient_error_.ok() && p.step.collected && !p.tensor.grad().defined())
      gradient_error_ = GradientRemoved(p.name);
  }
  progress_.NoteEndOfWalks();
  if (all_here) planning_.NoteRows();
  if (all_here && planning_.GoesByTime()) clock_.RecordStep(planning_.planned());
  const Status error = gradient_error_;
  End(/*abandoned=*/false);
  planning_.FinishStep(objections);
  progress_.ChooseEager();
  if (membership_.some_are_frozen()) NoteWhoIsFrozen();
  if (!error.ok()) context_.ThrowIfFailed(error);
}

void Step::End(bool abandoned) {
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
  planning_.EndStep(abandoned);
  evidence_.Restart(planning_.planned());
  clock_.EndStep();
}

void Step::Abandon() {
  router_.Abandon();
  End(/*abandoned=*/true);
}

void Step::Reset() {
  // What is under way on all ranks ends by itself, and then its names are free again. After a failure it ends too, by
  // Horovod's shutdown. Whatever does not end in time is left to its exchange.
  constexpr double kPatienceSeconds = 5;
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (const Sent& each : context_.in_flight) exchanges.push_back(each.exchange);
  {
    Unlocked unlocked(context_.mutex);
    context_.engine->WaitFor(exchanges, kPatienceSeconds);
  }
  Abandon();
}

bool Step::Discard() {
  const bool open = std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) {
    return !p.step.collected && (p.counter.touched() || p.counter.sent());
  });
  if (open) return false;
  End(/*abandoned=*/false);
  return true;
}

}  // namespace poseidon
