#include "torch/step_clock.h"

#include <algorithm>
#include <utility>

#include "core/base/median.h"
#include "torch/routes/route.h"

namespace poseidon {

namespace {

constexpr size_t kObservedSteps = 32;  // whole steps, whose median counts

void Push(double value, std::vector<double>* history, size_t most = kTimedSteps) {
  if (history->size() == most) history->erase(history->begin());
  history->push_back(value);
}

}  // namespace

void StepClock::NoteUpdated() {
  began_ = Clock::now();
  update_seconds_ = SecondsBetween(finished_, began_);
}

// Undoes, in the order of time, what the plan in force did to backward: factored layers skipped their local product and
// packed rows, and rebuilding took time from backward where they shared cores.
void StepClock::NoteFlushed(std::vector<Parameter>& parameters, const Undo& undo, bool record) {
  flushed_ = Clock::now();
  if (!record) return;
  std::vector<Parameter*> order;
  std::vector<const Exchange*> rebuilds;
  for (Parameter& p : parameters) {
    if (p.step.ready_seconds >= 0) order.push_back(&p);
    const bool first = p.route->members().front() == &p;
    if (first && p.route->Rebuilds() != nullptr) rebuilds.push_back(p.route->Rebuilds());
  }
  std::sort(order.begin(), order.end(),
            [](const Parameter* a, const Parameter* b) { return a->step.ready_seconds < b->step.ready_seconds; });

  const double stolen = undo.contention / (1 + undo.contention);
  const auto stolen_before = [&](double seconds) {
    double sum = 0;
    for (const Exchange* exchange : rebuilds) {
      if (exchange->state() != Exchange::State::kDone) continue;
      const ExchangeTimes& times = exchange->times();
      const double begin = SecondsBetween(began_, times.rebuild_begin);
      sum += std::max(0.0, std::min(seconds, SecondsBetween(began_, times.rebuild_end)) - std::max(0.0, begin));
    }
    return stolen * sum;
  };

  double shift = 0;
  for (Parameter* each : order) {
    Parameter& p = *each;
    double dense = p.step.ready_seconds - stolen_before(p.step.ready_seconds) + shift;
    const bool factored = p.route->Rebuilds() != nullptr && p.route->members().front() == &p;
    if (factored && p.index < static_cast<int>(undo.costs.size())) {
      const LayerCost& cost = undo.costs[p.index];
      dense += cost.input + cost.local - cost.pack;
      shift += cost.local - cost.pack;
    }
    shift -= undo.copy * p.route->CopiedBytes(p);
    Push(std::max(0.0, dense), &p.ready_history);
  }
  const double seconds = SecondsBetween(began_, flushed_);
  Push(std::max(0.0, seconds - stolen_before(seconds) + shift), &compute_history_);
}

void StepClock::NoteDone(const ExchangeTimes& times) {
  if (times.enqueued <= flushed_) last_done_ = std::max(last_done_, times.done);
}

void StepClock::RecordStep(bool planned) {
  if (!planned) {
    first_step_seconds_ = SecondsBetween(began_, std::max(flushed_, last_done_));
    return;
  }
  if (std::exchange(first_under_plan_, false)) return;
  Push(std::max(0.0, SinceBegan() - idle_seconds_), &step_history_, kObservedSteps);
  ++steps_under_plan_;
}

void StepClock::EndStep() {
  flushed_in_backward_ = false;
  idle_seconds_ = 0;
  began_ = finished_ = Clock::now();
}

void StepClock::ForgetSteps() {
  step_history_.clear();
  steps_under_plan_ = 0;
}

double StepClock::compute_seconds() const { return Median(compute_history_); }

double StepClock::step_seconds() const { return Median(step_history_); }

}  // namespace poseidon
