#include "core/plan/time_choice.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/plan/objective.h"

namespace poseidon {

namespace {

// What the model knows of choices, corrected by what was measured of some.
class Verdict {
 public:
  Verdict(const StepModel& model, const Search& search, const std::vector<TriedChoice>& tried, const Tuning& tuning)
      : model_(model), tuning_(tuning) {
    for (const TriedChoice& choice : tried) {
      if (search.Possible(choice.choice)) tried_.push_back(&choice);
    }
  }

  const TriedChoice* Tried(const Choice& choice) const {
    const auto it =
        std::find_if(tried_.begin(), tried_.end(), [&](const TriedChoice* t) { return t->choice == choice; });
    return it == tried_.end() ? nullptr : *it;
  }
  const TriedChoice* Fastest() const {
    const auto it = std::min_element(tried_.begin(), tried_.end(), [](const TriedChoice* a, const TriedChoice* b) {
      return a->seconds < b->seconds;
    });
    return it == tried_.end() ? nullptr : *it;
  }
  // Another than the fastest, null if there is none.
  const TriedChoice* Doubtful(const TriedChoice& fastest) const {
    const TriedChoice* found = nullptr;
    for (const TriedChoice* choice : tried_) {
      const bool seen = choice->total >= tuning_.look_seconds && choice->steps >= tuning_.look_steps;
      if (choice == &fastest || seen || choice->seconds >= tuning_.near * fastest.seconds) continue;
      if (found == nullptr || choice->seconds < found->seconds) found = choice;
    }
    return found;
  }
  // The model leaves more of the fastest unexplained than it explains.
  bool Refuted() const {
    return SimulateStep(model_, Fastest()->choice).step < tuning_.least_explained * Fastest()->seconds;
  }
  // Not tried, and not predicted to be far off, where a look is cheap.
  bool WorthALook(const Choice& choice) const {
    const TriedChoice& fastest = *Fastest();
    if (fastest.seconds >= tuning_.short_step || !MayTry(choice)) return false;
    return SimulateStep(model_, choice).step + Unexplained(fastest) < tuning_.near * fastest.seconds;
  }
  bool WorthTryingWhateverIsPredicted(const Choice& choice) const { return Refuted() && MayTry(choice); }
  // Not tried, and predicted to beat the fastest. `expected`: what the model did not explain of the fastest is expected
  // again.
  bool WorthTrying(const Choice& choice, double least_gain, bool expected,
                   double at_most = std::numeric_limits<double>::infinity()) const {
    if (Tried(choice) != nullptr) return false;
    const TriedChoice& fastest = *Fastest();
    const double unexplained = expected ? Unexplained(fastest) : 0;
    return std::min(at_most, SimulateStep(model_, choice).step + unexplained) < fastest.seconds - least_gain;
  }

 private:
  bool MayTry(const Choice& choice) const { return Tried(choice) == nullptr && tried_.size() < tuning_.most_tried; }
  double Unexplained(const TriedChoice& choice) const {
    return std::max(0.0, choice.seconds - SimulateStep(model_, choice.choice).step);
  }

  const StepModel& model_;
  const Tuning& tuning_;
  std::vector<const TriedChoice*> tried_;
};

// What a change must gain. What no choice can change does not count: the time before the first gradient is there.
double LeastGain(const StepModel& model, double plain_step, double margin) {
  double first = model.compute;
  for (const StepTensor& tensor : model.tensors) {
    if (tensor.ready >= 0) first = std::min(first, tensor.ready);
  }
  return margin * std::max(0.0, plain_step - first);
}

Choice Predicted(const StepModel& model, const Search& search, const Choice& current, double plain_objective,
                 double least, const Tuning& tuning) {
  double best;
  Choice choice = search.Best(&best);
  if (plain_objective - best < least) {
    best = plain_objective;
    choice = search.plain();
  }
  if (search.Possible(current) && Objective({&model}, current, tuning) - best < least) choice = current;
  return choice;
}

// There are many choices that the search may come up with, and only one all-plain: that one gets the benefit of the
// doubt. So does the one with the fewest bytes where the model is good for nothing. Of short steps both get a look.
Choice Corrected(const Choice& predicted, const Search& search, const Verdict& verdict, const Past& past,
                 double least) {
  const TriedChoice* fastest = verdict.Fastest();
  if (fastest == nullptr) return predicted;
  const TriedChoice* in_force = verdict.Tried(past.current);
  if (in_force != nullptr && in_force->seconds - fastest->seconds < least) fastest = in_force;
  if (verdict.WorthTrying(predicted, least, /*expected=*/true)) return predicted;
  const Choice& plain = search.plain();
  if (verdict.WorthTrying(plain, least, /*expected=*/false, past.plain_at_most) || verdict.WorthALook(plain)) {
    return plain;
  }
  const Choice fewest = search.FewestBytes();
  if (search.Possible(fewest) && (verdict.WorthTryingWhateverIsPredicted(fewest) || verdict.WorthALook(fewest))) {
    return fewest;
  }
  const TriedChoice* again = fastest == in_force ? verdict.Doubtful(*fastest) : nullptr;
  return again != nullptr ? again->choice : fastest->choice;
}

}  // namespace

TimeChoice ChooseByTime(const StepModel& given, const Allowed& allowed, double memory_bytes, const Past& past,
                        const Tuning& tuning) {
  const StepModel model = Bounded(given);
  const Search search(model, allowed, memory_bytes, tuning);
  const StepEstimate plain = SimulateStep(model, search.plain());
  const double least = LeastGain(model, plain.step, tuning.margin);
  const Choice predicted = Predicted(model, search, past.current, Objective(plain, tuning), least, tuning);
  const Verdict verdict(model, search, past.tried, tuning);
  return {Corrected(predicted, search, verdict, past, least), search.plain(), search.over_memory()};
}

}  // namespace poseidon
