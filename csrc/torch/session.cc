#include "torch/session.h"

#include <utility>

#include "torch/owners.h"
#include "torch/routes/factors_route.h"
#include "torch/routes/whole_route.h"
#include "torch/status_error.h"

namespace poseidon {

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

std::shared_ptr<Session> Session::Create(std::shared_ptr<Engine> engine, SessionOptions options) {
  std::shared_ptr<Session> session(new Session(std::move(engine), std::move(options)));
  Lock lock(session->mutex_);
  session->context_.owner = session;
  session->context_.hook_owner = session;
  session->step_.Attach();
  const SessionOptions& made = session->options_;
  NameSession(session.get(), made.tag + " (of " + std::to_string(made.params.size()) + " parameters, the first is " +
                                 (made.names.empty() ? "none" : made.names.front()) + ")");
  return session;
}

Session::Session(std::shared_ptr<Engine> engine, SessionOptions options)
    : options_(std::move(options)),
      context_(mutex_, std::move(engine), options_),
      parameters_(MakeParameters(options_, this)),
      progress_(parameters_, [this]() POSEIDON_UNCHECKED { step_.OnFirstComplete(); }),
      membership_(context_,
                  [this]() POSEIDON_UNCHECKED { router_.ForEach([](Route& route) { route.OnMembership(); }); }),
      evidence_(context_, parameters_),
      router_(context_, parameters_),
      planning_({context_, parameters_, evidence_, router_, clock_, membership_}),
      step_({context_, parameters_, progress_, clock_, membership_, evidence_, router_, planning_}) {
  context_.membership = &membership_;
  context_.progress = &progress_;
  context_.clock = &clock_;
}

Session::~Session() {
  ForgetSession(this);
  ReleaseParameters(this);
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
  step_.Attach();
}

bool Session::Capture(FactoredLayer& layer, at::ScalarType type, const std::function<void(bool)>& append) {
  FactorsRoute* route = layer.route;
  if (route == nullptr) return false;  // a graph from before Reset
  if (!layer.Accepts(type)) return false;
  Parameter& weight = *route->members().front();
  step_.AdmitPass(weight, /*fresh=*/false);
  if (weight.counter.sent() || weight.counter.remaining() <= 0) Throw(TooManyPasses(weight.name));
  step_.FollowMembership(/*gradient_is_complete=*/weight.counter.remaining() == 1);
  if (route->OnCall(CurrentWalk(), append)) {
    context_.NoteReady(route->members());
    NoteProgress();
  }
  return true;
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
  step_.AdmitPass(p, fresh);
  const PassCounter::Event event = p.counter.OnPass();
  if (event == PassCounter::Event::kTooMany) Throw(TooManyPasses(p.name));
  const bool complete = event == PassCounter::Event::kReady;
  step_.FollowMembership(complete);
  if (p.route->OnPass(p, CurrentWalk())) return NoteProgress();
  if (!complete) return;
  context_.NoteReady({&p});
  evidence_.Check(p);
  if (p.hooked) step_.RunHook(p);
  // A sparse gradient is sent when it is known that all ranks treat it so; one that another optimizer has too, in
  // Synchronize().
  p.step.sparse = grad.defined() && grad.is_sparse() && !options_.sparse_as_dense && !p.route->makes_dense();
  if (!p.step.sparse && p.own) p.route->OnComplete(p, fresh);
  NoteProgress();
}

// ---- Steps ---------------------------------------------------------------------------------------------------------

// A gradient may have become complete.
void Session::NoteProgress() {
  if (step_.MayWait()) walk_end_.Queue(weak_from_this());
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
  return step_.ReduceInBackward();
}

void Session::Synchronize() {
  if (InForkedChild()) {
    ThrowIfError(Status::FailedPrecondition(
        "This is a forked child process, in which Horovod does not run: its gradients stay its own. Step the optimizer "
        "that was wrapped, or spawn the process instead."));
  }
  Lock lock(mutex_);
  step_.Synchronize();
}

bool Session::Discard() {
  Lock lock(mutex_);
  return step_.Discard();
}

void Session::Reset() {
  Lock lock(mutex_);
  step_.Reset();
}

void Session::NoteWait() {
  if (InCompressor()) return;  // its collective comes in the same order on all ranks, in backward or before any wait
  Lock lock(mutex_);
  step_.NoteWait();
}

double Session::SumOverRanks(const std::string& what, double value) {
  Lock lock(mutex_);
  Status status;
  {
    Unlocked unlocked(mutex_);
    status = poseidon::SumOverRanks(*context_.engine, context_.WireName("agree", what), options_.process_set,
                                    options_.size, &value);
  }
  context_.ThrowIfFailed(status);
  return value;
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
  step_.Attach();  // parameters may have been unfrozen or converted since
}

void Session::NoteUpdated() {
  Lock lock(mutex_);
  clock_.NoteUpdated();
}

void Session::NoteJoin() {
  Lock lock(mutex_);
  planning_.NoteJoin();
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
  return planning_.plan();
}

SessionStats Session::Stats() const {
  Lock lock(mutex_);
  return context_.stats;
}

std::vector<std::string> Session::TakeWarnings() {
  Lock lock(mutex_);
  return planning_.TakeWarnings();
}

}  // namespace poseidon
