#include "core/plan/trials.h"

#include <algorithm>

namespace poseidon {

void Trials::Observe(const std::vector<TensorDecision>& in_force, const std::vector<DenseSlice>& slices, double seconds,
                     int64_t steps) {
  current_.clear();
  for (const TensorDecision& decision : in_force) current_.push_back(decision.scheme);
  slices_ = slices;
  if (current_.empty() || !(seconds > 0) || steps <= 0) return;
  auto it = std::find_if(tried_.begin(), tried_.end(), [&](const Tried& each) { return each.schemes == current_; });
  if (it == tried_.end()) it = tried_.insert(it, {current_, 0, 0, 0});
  const double seen = seconds * static_cast<double>(steps);
  const double before = std::min(it->total, tuning_.remembered_seconds);
  it->seconds = (it->seconds * before + seconds * seen) / (before + seen);
  it->total += seen;
  it->steps += steps;
}

}  // namespace poseidon
