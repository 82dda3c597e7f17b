#include "torch/session.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "torch/layers/factor_kernels.h"
#include "torch/owners.h"
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

bool IsCandidate(const at::Tensor& param) {
  return param.dim() == 2 && at::isFloatingType(param.scalar_type()) && param.layout() == at::kStrided &&
         param.is_contiguous() && param.numel() > 0;
}

// Ids travel in 32 bits.
bool IsCandidateTable(const at::Tensor& param) { return param.size(0) <= std::numeric_limits<uint32_t>::max(); }

}  // namespace

std::shared_ptr<Session> Session::Create(std::shared_ptr<Engine> engine, SessionOptions options) {
  std::shared_ptr<Session> session(new Session(std::move(engine), std::move(options)));
  std::lock_guard<std::mutex> lock(session->mutex_);
  session->Attach();
  const SessionOptions& made = session->options_;
  NameSession(session.get(), made.tag + " (of " + std::to_string(made.params.size()) + " parameters, the first is " +
                                 (made.names.empty() ? "none" : made.names.front()) + ")");
  return session;
}

Session::Session(std::shared_ptr<Engine> engine, SessionOptions options)
    : engine_(std::move(engine)),
      options_(std::move(options)),
      wire_format_{options_.compression == CompressionKind::kFp16 ? &HalfCodec() : &IdentityCodec(),
                   engine_->transport().traits()},
      agreement_(MakeAgreement()) {
  parameters_.resize(options_.params.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    p.tensor = options_.params[i];
    p.name = options_.names[i];
    p.counter = PassCounter(options_.passes_per_step);
    p.source = NewSource(p);
    p.hooked = !options_.hooked.empty() && options_.hooked[i];
    p.own = OwnParameter(p.tensor, this);
  }
  groups_.resize(options_.groups.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].members = options_.groups[g];
    for (int index : groups_[g].members) parameters_[index].group = static_cast<int>(g);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    if (!MayFactor(p, options_.overrides[i])) continue;
    p.layer = NewLayer(p);
    if (IsCandidateTable(p.tensor)) p.table = NewTable(p);
  }
}

bool Session::MayFactor(const Parameter& p, SchemeOverride wish) const {
  const bool asked = wish == SchemeOverride::kSfb || wish == SchemeOverride::kRowSparse;
  const bool may = options_.policy != Policy::kAllreduce || asked;
  return may && wish != SchemeOverride::kAllreduce && p.group < 0 && !p.hooked && CanFactor() && IsCandidate(p.tensor);
}

bool Session::CanFactor() const {
  return (options_.reduction.op == ReduceOp::kAverage || options_.reduction.op == ReduceOp::kSum) &&
         options_.compression != CompressionKind::kPython;
}

double Session::FactorScale() const { return options_.reduction.op == ReduceOp::kAverage ? 1.0 / options_.size : 1.0; }

std::shared_ptr<LinearLayer> Session::NewLayer(const Parameter& p) const {
  return std::make_shared<LinearLayer>(p.name, p.tensor, wire_format_, FactorScale());
}

std::shared_ptr<EmbeddingLayer> Session::NewTable(const Parameter& p) const {
  return std::make_shared<EmbeddingLayer>(p.name, p.tensor, wire_format_, FactorScale());
}

Session::~Session() {
  ForgetSession(this);
  ReleaseParameters(this);
  for (Parameter& p : parameters_) {
    if (p.layer) UnregisterLayer(*p.layer);
    if (p.table) UnregisterLayer(*p.table);
    if (p.accumulator) p.accumulator->del_post_hook(p.hook_key);
  }
}

// Idempotent: also notices parameters that were unfrozen, and accumulators that PyTorch replaced (module.to(dtype)).
void Session::Attach() {
  attached_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    if (!p.tensor.requires_grad()) continue;
    if (p.accumulator && ag::impl::try_get_grad_accumulator(p.tensor) == p.accumulator) continue;
    if (p.accumulator) p.accumulator->del_post_hook(p.hook_key);
    p.accumulator = ag::impl::grad_accumulator(p.tensor);
    p.hook_key = p.accumulator->add_post_hook(std::make_unique<AccumulatorHook>(weak_from_this(), static_cast<int>(i)));
    if (p.layer) p.layer->accumulator = p.accumulator.get();
    if (p.table) p.table->accumulator = p.accumulator.get();
    p.everywhere = p.everywhere || met_;  // unfrozen: on all ranks, until a plan knows better
    if (!p.active && p.layer) {           // also when unfrozen later: profiled until the next plan
      EnableCapture();
      for (const std::shared_ptr<FactoredLayer>& candidate : {p.layer, std::shared_ptr<FactoredLayer>(p.table)}) {
        if (!candidate) continue;
        RegisterLayer(candidate, weak_from_this());
        profiled_.push_back(candidate);
      }
    }
    p.active = true;
  }
  ChooseEager();
}

// ---- Hooks ---------------------------------------------------------------------------------------------------------

void Session::OnProfiled(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias) {
  std::lock_guard<std::mutex> lock(mutex_);
  layer.Profile(x, d, bias);
}

void Session::OnProfiled(EmbeddingLayer& layer, const TableRows& rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  layer.Profile(rows);
}

bool Session::OnCaptured(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d) {
  std::lock_guard<std::mutex> lock(mutex_);
  return Capture(layer, x.scalar_type(), [&](bool last_pass) { layer.Append(x, d, CurrentWalk(), last_pass); });
}

bool Session::OnCaptured(EmbeddingLayer& layer, const TableRows& rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  return Capture(layer, rows.d.scalar_type(), [&](bool last_pass) { layer.Append(rows, CurrentWalk(), last_pass); });
}

void Session::OnDeclined(FactoredLayer& layer) {
  std::lock_guard<std::mutex> lock(mutex_);
  layer.ShowHeldRows();
}

void Session::OnUnattached() {
  std::lock_guard<std::mutex> lock(mutex_);
  Attach();
}

bool Session::Capture(FactoredLayer& layer, at::ScalarType type, const std::function<void(bool)>& append) {
  const auto it = std::find_if(factored_.begin(), factored_.end(),
                               [&](const Factored& f) { return parameters_[f.weight].layer.get() == &layer; });
  if (it == factored_.end()) return false;  // a graph from before Reset
  if (!layer.Accepts(type)) return false;
  Parameter& weight = parameters_[it->weight];
  if (weight.collected && !weight.tensor.grad().defined()) DiscardLocked();  // the user has cleared the gradients
  if (weight.sent_without) throw StatusError(CameTooLate(weight.name));
  if (weight.counter.sent() || weight.counter.remaining() <= 0) throw StatusError(TooManyPasses(weight.name));
  const bool last_pass = weight.counter.remaining() == 1;
  FollowPresence(/*gradient_is_complete=*/last_pass);
  append(last_pass);
  if (NothingElseCanAdd(*it)) {
    layer.KeepWalk(CurrentWalk());
    if (SendFactors(*it)) ++stats_.early_messages;
    NoteReady(*it);
    NoteProgress();
  }
  return true;
}

// In the last pass, with all rows of this layer's calls at hand: may something else in this walk still add to the
// weight or the bias? Whatever could holds a reference to their gradient accumulator. So do we, and each live node of
// ours; when that explains all references there is nothing else. More references than accounts, or nodes that this walk
// does not reach, only delay the send until the accumulator's own hook.
bool Session::NothingElseCanAdd(const Factored& factored) const {
  const Parameter& weight = parameters_[factored.weight];
  const FactoredLayer& layer = *weight.layer;
  if (weight.counter.remaining() != 1 || !layer.AllNodesRan(CurrentWalk())) return false;
  if (static_cast<int64_t>(weight.accumulator.use_count()) != 1 + layer.live_weight_edges) return false;
  if (factored.bias < 0) return true;
  const Parameter& bias = parameters_[factored.bias];
  return bias.counter.remaining() == 1 && bias.accumulator &&
         static_cast<int64_t>(bias.accumulator.use_count()) == 1 + layer.live_bias_edges;
}

void Session::OnAccumulated(int index, const at::Tensor& incoming) {
  std::unique_lock<std::mutex> lock(mutex_);
  Parameter& p = parameters_[index];
  const at::Tensor& grad = p.tensor.grad();
  if (grad.defined() && grad.requires_grad()) {
    throw StatusError(Status::Assertion("The gradient of " + p.name +
                                        " requires a gradient itself (backward with create_graph=True), so it cannot "
                                        "be reduced in place. Use torch.autograd.grad for the inner gradient."));
  }
  const bool fresh =
      incoming.defined() && grad.defined() && !grad.is_sparse() && !incoming.is_sparse() && incoming.is_alias_of(grad);
  if (p.collected && fresh) DiscardLocked();  // the user has cleared the gradients
  if (p.sent_without) throw StatusError(CameTooLate(p.name));
  const PassCounter::Event event = p.counter.OnPass();
  if (event == PassCounter::Event::kTooMany) throw StatusError(TooManyPasses(p.name));
  FollowPresence(/*gradient_is_complete=*/event == PassCounter::Event::kReady);
  if (Factored* factored = FactoredOf(p)) {
    const auto part = index == factored->weight ? FactorLayer::kWeight : FactorLayer::kBias;
    parameters_[factored->weight].layer->EndPass(part, CurrentWalk());
    SendFactorsIfReady(*factored);
    NoteProgress();
    return;
  }
  if (event != PassCounter::Event::kReady) return;
  NoteReady(p);
  CheckProfile(p);
  if (p.hooked) RunHook(p, &lock);
  if (grad.defined() && grad.is_sparse() && !options_.sparse_as_dense && p.group < 0) {
    p.sparse_now = true;  // sent when it is known that all ranks treat it as sparse
  } else if (p.group >= 0) {
    SendGroupIfReady(groups_[p.group], /*complete=*/false);
  } else if (!p.sparse && p.own) {  // else in synchronize()
    SendByPlan(p, fresh);
  }
  NoteProgress();
}

// ---- Sending -------------------------------------------------------------------------------------------------------

Session::Factored* Session::FactoredOf(const Parameter& parameter) {
  if (parameter.layer_weight < 0) return nullptr;
  const auto it = std::find_if(factored_.begin(), factored_.end(),
                               [&](const Factored& f) { return f.weight == parameter.layer_weight; });
  return it == factored_.end() ? nullptr : &*it;
}

std::shared_ptr<GradSource> Session::NewSource(const Parameter& p) const {
  const int index = static_cast<int>(&p - parameters_.data());
  return std::make_shared<GradSource>(
      p.name, p.tensor, options_.compression, wire_format_,
      [compress = options_.compress, index](const at::Tensor& grad) { return compress(index, grad); });
}

void Session::ThrowIfFailed(const Status& status) const {
  if (status.ok()) return;
  std::string message = "[rank " + std::to_string(options_.rank) + "] " + status.message();
  const bool peer_may_have_gone = status.code() == StatusCode::kUnavailable || status.code() == StatusCode::kAborted;
  if (peer_may_have_gone && !factored_.empty()) {
    message +=
        " (If a rank has called hvd.join() while others still train: Horovod's join covers no allgather. Give "
        "DistributedOptimizer uneven_steps=True, or set POSEIDON_UNEVEN_STEPS=1.)";
  }
  throw StatusError(Status(status.code(), message));
}

void Session::Submit(const std::shared_ptr<Exchange>& exchange, std::vector<int> params) {
  ThrowIfFailed(engine_->Submit(exchange));
  in_flight_.push_back({exchange, std::move(params)});
}

void Session::SendDense(Parameter& p) {
  const bool left_in_flight = p.exchange && p.exchange->state() == Exchange::State::kInFlight;
  const at::ScalarType type = DenseWireType(p);  // the model may have been converted since
  if (!p.exchange || left_in_flight || p.exchange_type != type) {
    if (left_in_flight) p.source = NewSource(p);  // by Reset: its buffers stay its own
    p.exchange_type = type;
    const std::string name = WireName("allreduce", p.name);
    p.exchange = std::make_shared<DenseExchange>(name, std::vector<DenseExchange::Member>{{name, p.source}},
                                                 ReductionOf(p), options_.process_set, options_.size);
  }
  Submit(p.exchange, {static_cast<int>(&p - parameters_.data())});
  p.counter.MarkSent();
}

void Session::SendGroupIfReady(Group& group, bool complete) {
  if (group.sent) return;
  if (!complete) {
    for (int index : group.members) {
      const Parameter& p = parameters_[index];
      if (!p.counter.ready() || (p.hooked && !p.hook_ran && p.tensor.grad().defined())) return;
    }
  }
  if (!group.exchange || group.exchange->state() == Exchange::State::kInFlight) {
    std::vector<DenseExchange::Member> members;
    for (int index : group.members) {
      if (group.exchange) parameters_[index].source = NewSource(parameters_[index]);
      members.push_back({WireName("allreduce", parameters_[index].name), parameters_[index].source});
    }
    const std::string name = members.front().wire_name;
    group.exchange = std::make_shared<DenseExchange>(name, std::move(members), options_.reduction, options_.process_set,
                                                     options_.size);
  }
  Submit(group.exchange, group.members);
  group.sent = true;
  for (int index : group.members) parameters_[index].counter.MarkSent();
}

void Session::SendFactorsIfReady(Factored& factored) {
  const auto complete = [&](int index) {  // or frozen, so that nothing will come
    return index < 0 || parameters_[index].counter.ready() || !parameters_[index].tensor.requires_grad();
  };
  if (!complete(factored.weight) || !complete(factored.bias)) return;
  if (parameters_[factored.weight].counter.sent()) return;
  SendFactors(factored);
  NoteReady(factored);
}

bool Session::SendFactors(Factored& factored) {
  Parameter& weight = parameters_[factored.weight];
  if (weight.counter.sent() || !MayGather(factored)) return false;
  Buffer message;
  uint32_t flags = 0;
  double pack_seconds = 0;
  const bool reached = weight.counter.touched() || (factored.bias >= 0 && parameters_[factored.bias].counter.touched());
  ThrowIfError(weight.layer->PrepareMessage(reached, &message, &flags, &pack_seconds));
  factored.exchange->SetMessage(message, flags, pack_seconds);
  NoteThreadsOfTorch();
  std::vector<int> params{factored.weight};
  if (factored.bias >= 0) params.push_back(factored.bias);
  Submit(factored.exchange, std::move(params));
  weight.counter.MarkSent();
  if (factored.bias >= 0) parameters_[factored.bias].counter.MarkSent();
  return true;
}

std::vector<int> Session::Flush() {
  if (InForkedChild()) {
    ThrowIfError(
        Status::FailedPrecondition("This is a forked child process, in which Horovod does not run: its gradients stay "
                                   "its own. Step the optimizer that was wrapped, or spawn the process instead."));
  }
  std::unique_lock<std::mutex> lock(mutex_);
  Attach();
  if (settled_ == 0 || !timeline_recorded_) {
    flushed_ = Clock::now();
    RecordTimeline();
  } else {
    idle_seconds_ = SecondsBetween(reduced_at_, Clock::now());
  }
  CheckWhoWants();
  WaitForWhoIsHere();
  // Before the agreement, in which the others wait: a hook may fail, and synchronize() be called again.
  for (Parameter& p : parameters_) {
    if (p.hooked && p.active && !p.counter.sent()) RunHook(p, &lock);
  }
  // A first plan comes before what has not been sent, because it tells what is sparse. Later ones come in Finish(),
  // when all has been sent, because other ranks may wait for that within backward().
  MeetFirst();
  if (!planned_) AgreeIfDue();
  return SendRest(/*all=*/true);
}

// What has not been sent: zeros, or no rows, for what got no gradient. Of all parameters, or of eager ones. Returns
// those that the caller sends.
std::vector<int> Session::SendRest(bool all) {
  std::vector<int> sparse;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    if (!p.active || p.counter.sent() || !(all || p.eager)) continue;
    if (Factored* factored = FactoredOf(p)) {
      SendFactors(*factored);
    } else if (p.sparse && SomeRankIsMissing()) {
      SendSparseAsDense(p);
    } else if (p.sparse) {
      sparse.push_back(static_cast<int>(i));
      p.counter.MarkSent();
    } else if (p.group >= 0) {
      SendGroupIfReady(groups_[p.group], /*complete=*/true);
    } else if (SharedSliceOf(p) != nullptr) {
      CompleteSlice(slices_[p.slice]);
    } else {
      SendByPlan(p);
    }
  }
  return sparse;
}

void Session::AgreeIfDue() {
  if (!PlanIsDue() || PutOffWhileRanksAreMissing()) return;
  for (Parameter& p : parameters_) {
    if (p.counter.touched() && !p.counter.ready()) CheckProfile(p);
  }
  const Status agreed = AgreeOnPlan();
  if (agreed.code() == StatusCode::kInvalidArgument) ThrowIfError(agreed);  // the same on all ranks
  ThrowIfFailed(agreed);
}

// ---- End of a step -------------------------------------------------------------------------------------------------

Session::Compressed Session::Finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (planned_) AgreeIfDue();
  Compressed compressed = CollectLocked(/*all=*/true, &lock);
  std::vector<int> flagged;
  for (const Factored& factored : factored_) {
    if (!parameters_[factored.weight].counter.sent() || SomeRankIsMissing()) continue;
    stats_.of(factored.exchange->scheme()).tensors += factored.bias >= 0 ? 2 : 1;
    if ((factored.exchange->gathered_flags() & kFlagForeign) != 0) flagged.push_back(factored.weight);
  }
  for (const Parameter& p : parameters_) {  // reduced in backward(), and then taken away
    if (gradient_error_.ok() && p.collected && !p.tensor.grad().defined()) gradient_error_ = GradientRemoved(p.name);
  }
  if (walks_ > 0) usual_walks_ = walks_;
  NoteRows();
  RecordStep();
  const Status error = std::exchange(gradient_error_, Status::OK());
  EndStep();
  ++stats_.steps;
  schedule_.Tick();
  // All ranks read the same flags, so all of them stop here or none.
  for (int weight : flagged) {
    if (parameters_[weight].layer_weight < 0) continue;  // a new plan has just made it dense
    StopFactored(weight, std::string("part of its gradient came from elsewhere than ") +
                             parameters_[weight].layer->calls_text() + " in step " + std::to_string(stats_.steps - 1));
  }
  LookAgain();
  ChooseEager();
  some_are_frozen_ = some_are_frozen_ &&
                     std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return !p.active; });
  if (!error.ok()) ThrowIfFailed(error);
  return compressed;
}

void Session::EndStep() {
  in_flight_.clear();
  for (Parameter& p : parameters_) {
    p.counter.Reset();
    p.sparse_now = p.hook_ran = p.collected = p.sent_without = false;
    p.ready_seconds = -1;
    p.order = -1;
    if (p.layer) p.layer->EndStepOfProfile();
  }
  complete_ = settled_ = walks_ = 0;
  tried_to_meet_ = timeline_recorded_ = attached_ = asked_who_wants_ = false;
  idle_seconds_ = 0;
  gradient_error_ = Status::OK();
  for (Group& group : groups_) group.sent = false;
  EndStepOfSlices();
  for (Factored& factored : factored_) factored.held = false;
  presence_ = Presence::kNotAsked;
  if (std::exchange(adopt_next_plan_, false)) AdoptPlan();
  if (planned_) {
    profiled_.erase(std::remove_if(profiled_.begin(), profiled_.end(),
                                   [](const auto& layer) { return layer->mode() != FactoredLayer::Mode::kProfile; }),
                    profiled_.end());
  }
  for (const auto& layer : profiled_) layer->RestartProfile();
  step_began_ = finished_ = Clock::now();
}

void Session::AbandonStep() {
  for (Factored& factored : factored_) {
    if (factored.exchange->state() == Exchange::State::kInFlight) {
      RenewFactored(factored);
    } else {
      parameters_[factored.weight].layer->DropStep();
    }
  }
  adopt_next_plan_ = false;
  EndStep();
}

void Session::Reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  // What is under way on all ranks ends by itself, and then its names are free again. After a failure it ends too, by
  // Horovod's shutdown. Whatever does not end in time is left to its exchange.
  constexpr double kPatienceSeconds = 5;
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (const InFlight& each : in_flight_) exchanges.push_back(each.exchange);
  engine_->WaitFor(exchanges, kPatienceSeconds);
  AbandonStep();
}

void Session::SetPassesPerStep(int passes) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Parameter& p : parameters_) p.counter.SetPassesPerStep(passes);
}

void Session::NoteZeroed() {
  std::lock_guard<std::mutex> lock(mutex_);
  step_began_ = Clock::now();
  Attach();  // parameters may have been unfrozen or converted since
}

void Session::NoteUpdated() {
  std::lock_guard<std::mutex> lock(mutex_);
  step_began_ = Clock::now();
  update_seconds_ = SecondsBetween(finished_, step_began_);
}

void Session::NoteJoin() {
  std::lock_guard<std::mutex> lock(mutex_);
  schedule_.Restart();
}

// ---- Views ---------------------------------------------------------------------------------------------------------

std::vector<int> Session::TouchedParameters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> touched;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].counter.touched() || parameters_[i].counter.sent()) touched.push_back(static_cast<int>(i));
  }
  return touched;
}

std::vector<int> Session::CollectedParameters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> collected;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].collected) collected.push_back(static_cast<int>(i));
  }
  return collected;
}

std::vector<int> Session::Delays() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> delays;
  for (const Parameter& p : parameters_) delays.push_back(p.counter.remaining());
  return delays;
}

std::vector<int> Session::ActiveParameters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> active;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].active) active.push_back(static_cast<int>(i));
  }
  return active;
}

Plan Session::CurrentPlan() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return plan_;
}

SessionStats Session::Stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

std::vector<std::string> Session::TakeWarnings() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(warnings_, {});
}

}  // namespace poseidon
