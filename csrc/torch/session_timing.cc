// Session's clock: when in a step each gradient was complete, translated into what it would have been had everything
// been dense, so that the selector can predict any choice from it whatever the choice in force.
#include <algorithm>
#include <utility>
#include <vector>

#include "torch/session.h"

namespace poseidon {

namespace {

// Whose median counts.
constexpr size_t kSteps = 3;           // of a gradient's moment
constexpr size_t kObservedSteps = 32;  // of whole steps

void Push(double value, std::vector<double>* history, size_t most = kSteps) {
  if (history->size() == most) history->erase(history->begin());
  history->push_back(value);
}

}  // namespace

double Session::SinceStepBegan() const { return SecondsBetween(step_began_, Clock::now()); }

void Session::NoteReady(Parameter& p) {
  p.ready_seconds = SinceStepBegan();
  if (p.order >= 0) return;
  if (complete_ == 0) {  // who wants a gradient may have changed since the last step
    attached_ ? ChooseEager() : Attach();
    AskWhoWants();
  }
  p.order = complete_++;
  if (std::exchange(last_walk_, CurrentWalk()) != CurrentWalk()) ++walks_;
  settled_ += p.eager && p.tensor.requires_grad();
}

void Session::NoteReady(const Factored& factored) {
  NoteReady(parameters_[factored.weight]);
  if (factored.bias >= 0) NoteReady(parameters_[factored.bias]);
}

// The beginning of synchronize(). Undoes, in the order of time, what the plan in force did to backward: factored layers
// skipped their local product and packed rows, and rebuilding took time from backward where they shared cores.
void Session::RecordTimeline() {
  if (!GoesByTime() || !schedule_.DueWithin(static_cast<int64_t>(kSteps))) return;
  const Clock::time_point now = Clock::now();
  std::vector<size_t> order;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].ready_seconds >= 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return parameters_[a].ready_seconds < parameters_[b].ready_seconds; });

  const double stolen = agreement_.measured().contention / (1 + agreement_.measured().contention);
  const auto stolen_before = [&](double seconds) {
    double sum = 0;
    for (const Factored& factored : factored_) {
      if (factored.exchange->state() != Exchange::State::kDone) continue;
      const ExchangeTimes& times = factored.exchange->times();
      const double begin = SecondsBetween(step_began_, times.rebuild_begin);
      sum += std::max(0.0, std::min(seconds, SecondsBetween(step_began_, times.rebuild_end)) - std::max(0.0, begin));
    }
    return stolen * sum;
  };

  double shift = 0;
  for (size_t i : order) {
    Parameter& p = parameters_[i];
    double dense = p.ready_seconds - stolen_before(p.ready_seconds) + shift;
    if (p.layer_weight == static_cast<int>(i) && i < agreement_.my_costs().size()) {
      const LayerCost& cost = agreement_.my_costs()[i];
      dense += cost.input + cost.local - cost.pack;
      shift += cost.local - cost.pack;
    }
    const Slice* slice = SharedSliceOf(p);
    if (slice != nullptr && slice->pool && slice->pool->copied_bytes() > 0) {
      shift -= agreement_.measured().copy *
               static_cast<double>(p.tensor.numel() * static_cast<int64_t>(c10::elementSize(DenseWireType(p))));
    }
    Push(std::max(0.0, dense), &p.ready_history);
  }
  const double seconds = SecondsBetween(step_began_, now);
  Push(std::max(0.0, seconds - stolen_before(seconds) + shift), &compute_history_);
}

// The end of synchronize().
void Session::RecordStep() {
  if (!GoesByTime() || SomeRankIsMissing()) return;
  if (planned_) {
    if (std::exchange(first_under_plan_, false)) return;  // new names, new memory
    Push(std::max(0.0, SinceStepBegan() - idle_seconds_), &step_history_, kObservedSteps);
    ++steps_under_plan_;
    return;
  }
  first_step_seconds_ = SecondsBetween(step_began_, std::max(flushed_, last_done_));
}

}  // namespace poseidon
