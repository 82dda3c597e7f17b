#include "core/plan/search.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "core/plan/objective.h"

namespace poseidon {

Search::Search(const StepModel& model, const Allowed& allowed, double memory_bytes, const Tuning& tuning)
    : model_(model),
      allowed_(allowed),
      memory_bytes_(memory_bytes),
      tuning_(tuning),
      others_(allowed.size()),
      over_memory_(allowed.size()) {
  std::vector<std::tuple<double, size_t, int>> by_gain;
  for (size_t i = 0; i < allowed.size(); ++i) {
    plain_.push_back(allowed[i].front());
    const std::vector<Work>& offers = model.tensors[i].offers;
    const double alone = SecondsAlone(model, offers[plain_[i]]);
    for (size_t k = 1; k < allowed[i].size(); ++k) {
      const Work& work = offers[allowed[i][k]];
      by_gain.emplace_back((SecondsAlone(model, work) - alone) / std::max(1.0, work.memory_bytes), i, allowed[i][k]);
    }
  }
  std::sort(by_gain.begin(), by_gain.end());
  double left = memory_bytes;
  std::vector<std::vector<int>> kept(allowed.size());
  std::vector<bool> counted(allowed.size());  // a tensor takes one of its offers
  for (const auto& [gain, i, offer] : by_gain) {
    const double bytes = model.tensors[i].offers[offer].memory_bytes;
    if (gain < 0 && !counted[i]) {
      if (bytes > left) {
        over_memory_[i] = true;
        continue;
      }
      left -= bytes;
      counted[i] = true;
      over_memory_[i] = false;
    }
    if (bytes <= memory_bytes) kept[i].push_back(offer);
  }
  for (size_t i = 0; i < allowed.size(); ++i) {
    std::sort(kept[i].begin(), kept[i].end());
    if (!kept[i].empty()) free_.push_back(i);
  }
  others_ = std::move(kept);
}

Choice Search::StartWhere(const Better& better) const {
  Choice choice = plain_;
  for (size_t i : free_) {
    const std::vector<Work>& offers = model_.tensors[i].offers;
    for (int other : others_[i]) {
      if (better(offers[choice[i]], offers[other])) choice[i] = other;
    }
  }
  return choice;
}

Choice Search::FewestBytes() const {
  const auto sent = [](const Work& work) {
    return work.collective == Collective::kAllreduce ? 2 * work.bytes : work.bytes;
  };
  return StartWhere([&](const Work& a, const Work& b) { return sent(b) < sent(a); });
}

Choice Search::Best(double* objective) const {
  const auto transfer = [&](const Work& work) { return model_.network(work.collective).beta * work.bytes; };
  const auto alone = [&](const Work& work) { return SecondsAlone(model_, work); };
  Choice everything = plain_;
  for (size_t i : free_) {
    everything[i] = *std::min_element(others_[i].begin(), others_[i].end(), [&](int a, int b) {
      return alone(model_.tensors[i].offers[a]) < alone(model_.tensors[i].offers[b]);
    });
  }
  Choice best;
  *objective = std::numeric_limits<double>::infinity();
  for (Choice& start : std::vector<Choice>{
           plain_, everything, StartWhere([&](const Work& a, const Work& b) { return alone(b) < alone(a); }),
           StartWhere([&](const Work& a, const Work& b) { return transfer(b) < transfer(a); })}) {
    const double reached = Improve(&start);
    if (reached >= *objective) continue;
    *objective = reached;
    best = std::move(start);
  }
  return best;
}

double Search::Improve(Choice* choice) const {
  double best = Objective({&model_}, *choice, tuning_);
  for (int sweep = 0; sweep < tuning_.most_sweeps; ++sweep) {
    bool changed = false;
    for (size_t i : free_) changed = ChangeIfBetter({i}, choice, &best) || changed;
    if (changed) continue;
    // Where no single change helps, two together may: one takes the other's place on the channel.
    for (size_t a = 0; a < free_.size(); ++a) {
      const size_t end =
          free_.size() <= tuning_.most_for_all_pairs ? free_.size() : std::min(free_.size(), a + tuning_.pair_distance);
      for (size_t b = a + 1; b < end; ++b) changed = ChangeIfBetter({free_[a], free_[b]}, choice, &best) || changed;
    }
    if (!changed) break;
  }
  return best;
}

// Tries all ways in which every one of these tensors, one or two, takes another offer; keeps the best of them.
bool Search::ChangeIfBetter(const std::vector<size_t>& tensors, Choice* choice, double* best) const {
  const auto alternatives = [&](size_t i) {
    std::vector<int> all = others_[i];
    all.push_back(plain_[i]);
    all.erase(std::remove(all.begin(), all.end(), (*choice)[i]), all.end());
    return all;
  };
  Choice tried = *choice;
  bool changed = false;
  const std::vector<int> firsts = alternatives(tensors.front());
  const std::vector<int> seconds = tensors.size() > 1 ? alternatives(tensors.back()) : std::vector<int>{0};
  for (int first : firsts) {
    for (int second : seconds) {
      tried[tensors.front()] = first;
      if (tensors.size() > 1) tried[tensors.back()] = second;
      const double objective = Fits(tried) ? Objective({&model_}, tried, tuning_) : *best;
      if (objective >= *best) continue;
      *best = objective;
      *choice = tried;
      changed = true;
    }
  }
  return changed;
}

bool Search::Possible(const Choice& choice) const {
  if (choice.size() != plain_.size()) return false;
  for (size_t i = 0; i < choice.size(); ++i) {
    const bool other = std::find(others_[i].begin(), others_[i].end(), choice[i]) != others_[i].end();
    if (choice[i] != plain_[i] && !other) return false;
  }
  return Fits(choice);
}

bool Search::Fits(const Choice& choice) const {
  double bytes = 0;
  for (size_t i : free_) bytes += choice[i] == plain_[i] ? 0 : model_.tensors[i].offers[choice[i]].memory_bytes;
  return bytes <= memory_bytes_;
}

}  // namespace poseidon
