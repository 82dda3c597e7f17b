// The search among the offers that tensors may take, by prediction alone. Pure, any thread.
#pragma once

#include <functional>
#include <vector>

#include "core/model/step_model.h"
#include "core/plan/tuning.h"

namespace poseidon {

// By tensor: indices of the offers that it may take, at least one. The first is what it takes where nothing is better.
using Allowed = std::vector<std::vector<int>>;

class Search {
 public:
  // memory_bytes: for Work::memory_bytes of all chosen offers together, those without a choice not counted. What gains
  // most per byte keeps its place when there is not enough. The model and `allowed` must outlive the search.
  Search(const StepModel& model, const Allowed& allowed, double memory_bytes, const Tuning& tuning);

  // Every tensor's first.
  const Choice& plain() const { return plain_; }
  // By tensor: the limit keeps an offer from it that would gain.
  const std::vector<bool>& over_memory() const { return over_memory_; }

  // The shortest step that was found, and its objective. Starts from the best of each tensor alone, from the fewest
  // bytes, from everything that is not plain and from everything that is, and changes one tensor or two at a time while
  // that helps.
  Choice Best(double* objective) const;
  // Of each tensor the offer that spends least of the network's bandwidth, whatever else it takes. A ring sends a
  // gathered byte once and an allreduced one twice.
  Choice FewestBytes() const;

  // Whether a choice keeps to the allowed offers and the memory limit.
  bool Possible(const Choice& choice) const;

 private:
  // better(a, b): b rather than a, which is the tensor's first or came before.
  using Better = std::function<bool(const Work& a, const Work& b)>;
  Choice StartWhere(const Better& better) const;
  double Improve(Choice* choice) const;
  bool ChangeIfBetter(const std::vector<size_t>& tensors, Choice* choice, double* best) const;
  bool Fits(const Choice& choice) const;

  const StepModel& model_;
  const Allowed& allowed_;
  const double memory_bytes_;
  const Tuning& tuning_;
  Choice plain_;
  std::vector<size_t> free_;              // tensors with a choice
  std::vector<std::vector<int>> others_;  // by tensor, what it may take besides its first
  std::vector<bool> over_memory_;
};

}  // namespace poseidon
