#include "core/plan/time_choice.h"

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <utility>

namespace poseidon {

double Objective(const StepEstimate& estimate) {
  constexpr double kBusyWeight = 0.01;
  return estimate.step + kBusyWeight * (estimate.channel + estimate.rebuild);
}

namespace {

constexpr int kMostSweeps = 12;
constexpr size_t kMostForAllPairs = 32;
constexpr size_t kPairDistance = 6;
// Of a step that was observed. A model that explains less is not believed.
constexpr double kLeastExplained = 0.5;
// Short steps vary: until a choice has been in force for so long, one that took less than kNear times the fastest may
// be as good.
constexpr double kLookSeconds = 0.3;
constexpr int64_t kLookSteps = 3;
constexpr double kNear = 1.5;
// Steps so short are tried without much ado.
constexpr double kShortStep = 0.04;
// Choices that are tried although something else is predicted to be better.
constexpr size_t kMostTried = 4;

double Objective(const StepModel& model, const std::vector<Scheme>& schemes) {
  return Objective(SimulateStep(model, schemes));
}

double AloneAllreduce(const StepModel& model, const StepTensor& tensor) {
  return model.allreduce.Seconds(tensor.allreduce_bytes) + tensor.cost.local;
}

double AloneGather(const StepModel& model, const StepTensor& tensor) {
  return model.allgather.Seconds(tensor.gather_bytes) + tensor.cost.pack + tensor.cost.rebuild;
}

class Search {
 public:
  Search(const StepModel& model, const std::vector<Scheme>& alternative, const std::vector<bool>& forced,
         const TimeChoiceSettings& settings)
      : model_(model), alternative_(alternative), settings_(settings) {
    dense_.assign(model.tensors.size(), Scheme::kAllreduce);
    for (size_t i = 0; i < dense_.size(); ++i) {
      if (alternative[i] == Scheme::kAllreduce) continue;
      if (forced[i]) {
        dense_[i] = alternative[i];
      } else {
        free_.push_back(i);
      }
    }
    // What gains most per byte of memory keeps its place when there is not enough of it.
    double left = settings.gather_memory_bytes;
    std::vector<std::pair<double, size_t>> by_gain;
    for (size_t i : free_) {
      const StepTensor& tensor = model.tensors[i];
      by_gain.emplace_back(
          (AloneGather(model, tensor) - AloneAllreduce(model, tensor)) / std::max(1.0, tensor.gather_bytes), i);
    }
    std::sort(by_gain.begin(), by_gain.end());
    free_.clear();
    over_memory.assign(dense_.size(), false);
    for (const auto& [gain, i] : by_gain) {
      if (gain < 0 && model.tensors[i].gather_bytes > left) {
        over_memory[i] = true;
        continue;
      }
      if (gain < 0) left -= model.tensors[i].gather_bytes;
      if (model.tensors[i].gather_bytes <= settings.gather_memory_bytes) free_.push_back(i);
    }
    std::sort(free_.begin(), free_.end());
  }

  const std::vector<Scheme>& dense() const { return dense_; }

  template <typename Better>
  std::vector<Scheme> StartWhere(Better better) const {
    std::vector<Scheme> schemes = dense_;
    for (size_t i : free_) {
      if (better(model_.tensors[i])) schemes[i] = alternative_[i];
    }
    return schemes;
  }

  double Improve(std::vector<Scheme>* schemes) const {
    double best = Objective(model_, *schemes);
    for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
      bool changed = false;
      for (size_t i : free_) changed = FlipIfBetter({i}, schemes, &best) || changed;
      if (changed) continue;
      // Where no single change helps, two together may: one takes the other's place on the channel.
      for (size_t a = 0; a < free_.size(); ++a) {
        const size_t end = free_.size() <= kMostForAllPairs ? free_.size() : std::min(free_.size(), a + kPairDistance);
        for (size_t b = a + 1; b < end; ++b) changed = FlipIfBetter({free_[a], free_[b]}, schemes, &best) || changed;
      }
      if (!changed) break;
    }
    return best;
  }

  // A choice that keeps to the forced tensors, the alternatives and the memory limit.
  bool Possible(const std::vector<Scheme>& schemes) const {
    if (schemes.size() != dense_.size()) return false;
    for (size_t i = 0; i < schemes.size(); ++i) {
      const bool free = std::binary_search(free_.begin(), free_.end(), i);
      if (schemes[i] != dense_[i] && !(free && schemes[i] == alternative_[i])) return false;
    }
    return Fits(schemes);
  }

  std::vector<bool> over_memory;

 private:
  bool FlipIfBetter(std::initializer_list<size_t> tensors, std::vector<Scheme>* schemes, double* best) const {
    const auto flip = [&] {
      for (size_t i : tensors)
        (*schemes)[i] = (*schemes)[i] == Scheme::kAllreduce ? alternative_[i] : Scheme::kAllreduce;
    };
    flip();
    const double objective = Fits(*schemes) ? Objective(model_, *schemes) : *best;
    if (objective < *best) {
      *best = objective;
      return true;
    }
    flip();
    return false;
  }

  bool Fits(const std::vector<Scheme>& schemes) const {
    double bytes = 0;
    for (size_t i : free_) bytes += schemes[i] == Scheme::kAllreduce ? 0 : model_.tensors[i].gather_bytes;
    return bytes <= settings_.gather_memory_bytes;
  }

  const StepModel& model_;
  const std::vector<Scheme>& alternative_;
  const TimeChoiceSettings& settings_;
  std::vector<Scheme> dense_;  // forced ones as they are forced
  std::vector<size_t> free_;
};

// What the model knows of choices, corrected by what was measured of some.
class Verdict {
 public:
  Verdict(const StepModel& model, const Search& search, const std::vector<TriedChoice>& tried) : model_(model) {
    for (const TriedChoice& choice : tried) {
      if (search.Possible(choice.schemes)) tried_.push_back(&choice);
    }
  }

  const TriedChoice* Tried(const std::vector<Scheme>& schemes) const {
    const auto it =
        std::find_if(tried_.begin(), tried_.end(), [&](const TriedChoice* t) { return t->schemes == schemes; });
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
      const bool seen = choice->total >= kLookSeconds && choice->steps >= kLookSteps;
      if (choice == &fastest || seen || choice->seconds >= kNear * fastest.seconds) continue;
      if (found == nullptr || choice->seconds < found->seconds) found = choice;
    }
    return found;
  }
  // The model leaves more of the fastest unexplained than it explains.
  bool Refuted() const { return SimulateStep(model_, Fastest()->schemes).step < kLeastExplained * Fastest()->seconds; }
  // Not tried, and not predicted to be far off, where a look is cheap.
  bool WorthALook(const std::vector<Scheme>& schemes) const {
    const TriedChoice& fastest = *Fastest();
    if (fastest.seconds >= kShortStep || Tried(schemes) != nullptr || tried_.size() >= kMostTried) return false;
    return SimulateStep(model_, schemes).step + Unexplained(fastest) < kNear * fastest.seconds;
  }
  bool WorthTryingWhateverIsPredicted(const std::vector<Scheme>& schemes) const {
    return Refuted() && Tried(schemes) == nullptr && tried_.size() < kMostTried;
  }
  // Not tried, and predicted to beat the fastest. `expected`: what the model did not explain of the fastest is expected
  // again.
  bool WorthTrying(const std::vector<Scheme>& schemes, double least_gain, bool expected,
                   double at_most = std::numeric_limits<double>::infinity()) const {
    if (Tried(schemes) != nullptr) return false;
    const TriedChoice& fastest = *Fastest();
    const double unexplained = expected ? Unexplained(fastest) : 0;
    return std::min(at_most, SimulateStep(model_, schemes).step + unexplained) < fastest.seconds - least_gain;
  }

 private:
  double Unexplained(const TriedChoice& choice) const {
    return std::max(0.0, choice.seconds - SimulateStep(model_, choice.schemes).step);
  }

  const StepModel& model_;
  std::vector<const TriedChoice*> tried_;
};

}  // namespace

TimeChoice ChooseByTime(const StepModel& given, const std::vector<Scheme>& alternative, const std::vector<bool>& forced,
                        const TimeChoiceSettings& settings, const std::vector<Scheme>& current,
                        const std::vector<TriedChoice>& tried, double dense_at_most) {
  const StepModel model = Bounded(given);
  Search search(model, alternative, forced, settings);
  TimeChoice choice;
  choice.over_memory = search.over_memory;
  choice.dense_schemes = search.dense();
  choice.dense = SimulateStep(model, search.dense());

  std::vector<std::vector<Scheme>> starts = {
      search.dense(), search.StartWhere([](const StepTensor&) { return true; }),
      search.StartWhere([&](const StepTensor& t) { return AloneGather(model, t) < AloneAllreduce(model, t); }),
      search.StartWhere([&](const StepTensor& t) {
        return model.allgather.beta * t.gather_bytes < model.allreduce.beta * t.allreduce_bytes;
      })};
  double best = std::numeric_limits<double>::infinity();
  for (std::vector<Scheme>& start : starts) {
    const double objective = search.Improve(&start);
    if (objective >= best) continue;
    best = objective;
    choice.schemes = std::move(start);
  }

  // What no choice can change does not count: the time before the first gradient is there.
  double first = model.compute;
  for (const StepTensor& tensor : model.tensors) {
    if (tensor.ready >= 0) first = std::min(first, tensor.ready);
  }
  const double least = settings.margin * std::max(0.0, choice.dense.step - first);
  if (Objective(choice.dense) - best < least) {
    best = Objective(choice.dense);
    choice.schemes = search.dense();
  }
  if (search.Possible(current) && Objective(model, current) - best < least) choice.schemes = current;

  const Verdict verdict(model, search, tried);
  if (const TriedChoice* fastest = verdict.Fastest()) {
    const TriedChoice* in_force = verdict.Tried(current);
    if (in_force != nullptr && in_force->seconds - fastest->seconds < least) fastest = in_force;
    // There are many choices that the search may come up with, and only one all-allreduce: that one gets the benefit of
    // the doubt. So does the one with the fewest bytes where the model is good for nothing. Of short steps both get a
    // look.
    const std::vector<Scheme> fewest =
        search.StartWhere([](const StepTensor& t) { return t.gather_bytes < 2 * t.allreduce_bytes; });
    if (!verdict.WorthTrying(choice.schemes, least, /*expected=*/true)) {
      const bool try_dense = verdict.WorthTrying(search.dense(), least, /*expected=*/false, dense_at_most) ||
                             verdict.WorthALook(search.dense());
      const bool try_fewest = !try_dense && search.Possible(fewest) &&
                              (verdict.WorthTryingWhateverIsPredicted(fewest) || verdict.WorthALook(fewest));
      const TriedChoice* again = fastest == in_force ? verdict.Doubtful(*fastest) : nullptr;
      choice.schemes = try_dense          ? search.dense()
                       : try_fewest       ? fewest
                       : again != nullptr ? again->schemes
                                          : fastest->schemes;
    }
  }
  choice.chosen = SimulateStep(model, choice.schemes);
  return choice;
}

}  // namespace poseidon
