// Session's reduction in backward(): when backward() returns, gradients are reduced and in place, as users of one
// process, or of PyTorch's DistributedDataParallel, know it. What they then do to .grad (clip, scale, look at, skip the
// step) acts on the same numbers on all ranks.
//
// A rank waits at the end of the outermost backward() in which the last of its eager gradients was sent. Eager are
// gradients that every rank completed in backward when that was looked at last, so none of them waits for what another
// rank sends in synchronize() only. The others, such as those of a head that some ranks do not use, are reduced in
// synchronize() or step() as in Horovod. Waiting is a matter of each rank: it changes no collective.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/node.h>

#include <algorithm>
#include <utility>

#include "torch/routes/grad_place.h"
#include "torch/session.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

namespace ag = torch::autograd;

// In a node's walk after the node that had another walk inside.
class OuterWalkHook final : public ag::FunctionPostHook, public OwnHook {
 public:
  explicit OuterWalkHook(std::weak_ptr<Session> session) : session_(std::move(session)) {}
  ag::variable_list operator()(const ag::variable_list& outputs, const ag::variable_list&) override {
    if (auto session = session_.lock()) session->OnOuterWalk();
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {}

 private:
  const std::weak_ptr<Session> session_;
};

}  // namespace

// From what ranks have agreed on, and from the plan in force: gradients that travel together are eager together. A
// frozen parameter, which will get no gradient, is not waited for: its zeros are sent with the last of the others.
void Session::ChooseEager() {
  for (Parameter& p : parameters_) p.eager = p.active && p.own && p.everywhere;
  const auto together = [&](const std::vector<int>& members) {
    const bool all = std::all_of(members.begin(), members.end(), [&](int i) { return parameters_[i].eager; });
    for (int i : members) parameters_[i].eager = all;
  };
  for (const Group& group : groups_) together(group.members);
  for (const Slice& slice : slices_) together(slice.members);
  for (const Factored& factored : factored_) {
    if (factored.bias >= 0) together({factored.weight, factored.bias});
  }
  eager_count_ = settled_ = 0;
  for (const Parameter& p : parameters_) {
    if (!p.tensor.requires_grad()) continue;
    eager_count_ += p.eager;
    settled_ += p.eager && p.order >= 0;
  }
}

// A gradient has become complete.
void Session::NoteProgress() {
  if (!options_.reduce_in_backward || options_.size <= 1) return;
  const bool complete = met_ ? eager_count_ > 0 && settled_ == eager_count_ : complete_ > 0 && !tried_to_meet_;
  if (complete) QueueWalkEnd();
}

void Session::QueueWalkEnd() {
  const int walk = CurrentWalk();
  if (walk < 0 || walk == callback_walk_) return;
  callback_walk_ = walk;
  ag::Engine::get_default_engine().queue_callback([session = weak_from_this()] {
    if (auto self = session.lock()) self->OnWalkEnd();
  });
}

void Session::OnOuterWalk() {
  std::lock_guard<std::mutex> lock(mutex_);
  QueueWalkEnd();
}

void Session::OnWalkEnd() {
  if (const auto outer = ag::get_current_node()) {
    // This walk was inside another one (reentrant checkpointing), which is not over. Its later nodes bring us back.
    std::lock_guard<std::mutex> lock(mutex_);
    for (const ag::Edge& edge : outer->next_edges()) {
      if (!edge.is_valid()) continue;
      outer_hooks_.emplace_back(edge.function,
                                edge.function->add_post_hook(std::make_unique<OuterWalkHook>(weak_from_this())));
    }
    return;
  }
  if (options_.reduce && NeedsPythonToReduce()) return options_.reduce();
  if (BeginReduce()) Collect();
}

bool Session::NeedsPythonToReduce() {
  std::lock_guard<std::mutex> lock(mutex_);
  return hooks_after_ || options_.compression == CompressionKind::kPython ||
         std::any_of(parameters_.begin(), parameters_.end(),
                     [](const Parameter& p) { return p.sparse_now || (p.sparse && p.eager); });
}

std::optional<std::vector<int>> Session::BeginReduce() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (auto& [node, key] : outer_hooks_) node->del_post_hook(key);
  outer_hooks_.clear();
  if (!MeetFirst() || eager_count_ == 0 || settled_ != eager_count_) return std::nullopt;
  if (!timeline_recorded_) {
    flushed_ = Clock::now();
    RecordTimeline();
    timeline_recorded_ = true;
  }
  CheckWhoWants();
  WaitForWhoIsHere();
  if (SomeRankIsMissing()) return std::nullopt;  // what needs all ranks waits for synchronize()
  return SendRest(/*all=*/false);
}

// In step 0 ranks tell each other what parameters they have and which of their gradients are complete, before any of
// them waits. All do so once: at the end of the first backward that completes a gradient, or in synchronize().
bool Session::MeetFirst() {
  if (met_ || tried_to_meet_) return met_;
  tried_to_meet_ = true;
  WaitForWhoIsHere();
  if (PutOffWhileRanksAreMissing()) return false;
  MergedProfile merged;
  const Status status = GatherProfiles("first", &merged);
  if (status.code() == StatusCode::kInvalidArgument) ThrowIfError(status);  // the same on all ranks
  ThrowIfFailed(status);
  met_ = true;
  some_are_frozen_ = std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return !p.active; });
  // The profiles have told it, for this step. A rank that met the others in its backward() would ask once more in
  // synchronize(), one that met them there would not.
  asked_who_wants_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    p.everywhere = merged.tensors[i].everywhere;
    p.sparse = p.sparse || (p.everywhere && merged.tensors[i].sparse);
  }
  ChooseEager();
  return true;
}

Session::Compressed Session::Collect() {
  std::unique_lock<std::mutex> lock(mutex_);
  Compressed compressed = CollectLocked(/*all=*/false, &lock);
  reduced_at_ = Clock::now();
  return compressed;
}

// Waits for the exchanges of eager parameters, or of all, without the lock: other threads may run backward meanwhile.
Session::Compressed Session::CollectLocked(bool all, std::unique_lock<std::mutex>* lock) {
  const auto chosen = [&](const Parameter& p) { return p.counter.sent() && !p.collected && (all || p.eager); };
  std::vector<std::shared_ptr<Exchange>> waited;
  for (const InFlight& each : in_flight_) {
    const bool wanted =
        std::all_of(each.params.begin(), each.params.end(), [&](int i) { return chosen(parameters_[i]); });
    if (all || wanted) waited.push_back(each.exchange);
  }
  std::vector<size_t> todo;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (chosen(parameters_[i])) todo.push_back(i);
  }
  double waited_seconds[kSchemeCount] = {};
  const Clock::time_point begin = Clock::now();
  lock->unlock();
  const Status status = engine_->Wait(waited, waited_seconds);
  lock->lock();
  stats_.synchronize_seconds += SecondsBetween(begin, Clock::now());
  for (size_t scheme = 0; scheme < stats_.by_scheme.size(); ++scheme)
    stats_.by_scheme[scheme].waited_seconds += waited_seconds[scheme];
  if (!status.ok()) {
    AbandonStep();
    ThrowIfFailed(status);
  }
  const auto was_waited_for = [&](const InFlight& each) {
    return std::find(waited.begin(), waited.end(), each.exchange) != waited.end();
  };
  for (const InFlight& each : in_flight_) {
    if (!was_waited_for(each)) continue;
    const auto* dense = dynamic_cast<const DenseExchange*>(each.exchange.get());
    stats_.of(each.exchange->scheme())
        .Add(each.exchange->times(), each.exchange->wire(), dense ? static_cast<int64_t>(dense->gradients()) : 0);
    // In step 0 ranks agree on the plan meanwhile. What was sent before that had its turn before.
    if (each.exchange->times().enqueued <= flushed_) last_done_ = std::max(last_done_, each.exchange->times().done);
  }
  in_flight_.erase(std::remove_if(in_flight_.begin(), in_flight_.end(), was_waited_for), in_flight_.end());
  Compressed compressed;
  for (size_t i : todo) {
    const Status finished = FinishParameter(i, &compressed);
    if (gradient_error_.ok() && !finished.ok())
      gradient_error_ = finished;  // thrown at the end of the step, when nothing is in flight
  }
  return compressed;
}

// Its exchange has ended: makes the result visible. A slice and a layer do so for all their members at once.
Status Session::FinishParameter(size_t index, Compressed* compressed) {
  Parameter& p = parameters_[index];
  p.collected = true;
  if (p.layer_weight >= 0 && !SomeRankIsMissing()) {
    return p.layer_weight == static_cast<int>(index) ? p.layer->FinishStep() : Status::OK();
  }
  if (p.sparse && !SomeRankIsMissing()) return Status::OK();  // the caller's
  if (SharedSliceOf(p) != nullptr) {
    Slice& slice = slices_[p.slice];
    if (slice.members.front() != static_cast<int>(index)) return Status::OK();
    CountSlice(*slice.pool, slice.pool->bytes());
    return slice.pool->FinishOnTrainingThread();
  }
  if (p.slice >= 0 || !p.parts.empty()) {
    CountSlice(*p.source, p.tensor.numel() * static_cast<int64_t>(c10::elementSize(DenseWireType(p))),
               std::max<int64_t>(1, static_cast<int64_t>(p.parts.size())));
  }
  const Status status = p.source->FinishOnTrainingThread();
  at::Tensor received = p.source->TakeCompressed();
  if (received.defined()) compressed->emplace_back(static_cast<int>(index), std::move(received));
  return status;
}

// A rank whose backward() left eager gradients out, because this batch did not use a layer, does not wait in
// backward(); the others do, for those gradients, which it sends in synchronize(). If a collective of the script's own
// comes before that, each would wait for the other. So the rank sends now that it has none. Not if the step may bring
// more walks, as far as earlier steps tell.
void Session::NoteWait() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!options_.reduce_in_backward || !met_ || complete_ == 0 || settled_ == eager_count_ || walks_ < usual_walks_ ||
      CurrentWalk() >= 0)
    return;
  std::vector<Parameter*> left_out;
  for (Parameter& p : parameters_) {
    if (!p.eager || p.counter.sent()) continue;
    if (p.sparse || (p.counter.touched() && !p.counter.ready()))
      return;  // what only synchronize() can send; passes that may follow
    if (!p.counter.touched()) left_out.push_back(&p);
  }
  SendRest(/*all=*/false);
  for (Parameter* p : left_out) p->sent_without = p->counter.sent();
}

bool Session::Discard() {
  std::lock_guard<std::mutex> lock(mutex_);
  return DiscardLocked();
}

bool Session::DiscardLocked() {
  const bool open = std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) {
    return !p.collected && (p.counter.touched() || p.counter.sent());
  });
  if (open) return false;
  EndStep();
  return true;
}

void Session::SetHooksAfter(bool any) {
  std::lock_guard<std::mutex> lock(mutex_);
  hooks_after_ = any;
}

}  // namespace poseidon
