#include "torch/progress.h"

#include <algorithm>
#include <utility>

#include "torch/routes/route.h"

namespace poseidon {

void Progress::ChooseEager() {
  for (Parameter& p : parameters_) p.agreed.eager = p.active && p.own && p.agreed.everywhere;
  for (Parameter& p : parameters_) {
    if (!p.route) continue;
    const std::vector<Parameter*>& together = p.route->members();
    if (together.size() < 2 || together.front() != &p) continue;
    const bool all =
        std::all_of(together.begin(), together.end(), [](const Parameter* member) { return member->agreed.eager; });
    for (Parameter* member : together) member->agreed.eager = all;
  }
  eager_ = settled_ = 0;
  for (const Parameter& p : parameters_) {
    if (!p.tensor.requires_grad()) continue;
    eager_ += p.agreed.eager;
    settled_ += p.agreed.eager && p.step.order >= 0;
  }
}

void Progress::Note(Parameter& p, double seconds) {
  p.step.ready_seconds = seconds;
  if (p.step.order >= 0) return;
  if (complete_ == 0) first_();
  p.step.order = complete_++;
  if (std::exchange(last_walk_, CurrentWalk()) != CurrentWalk()) ++walks_;
  settled_ += p.agreed.eager && p.tensor.requires_grad();
}

void Progress::EndStep() { complete_ = settled_ = walks_ = 0; }

void Progress::NoteEndOfWalks() {
  if (walks_ > 0) usual_walks_ = walks_;
}

}  // namespace poseidon
