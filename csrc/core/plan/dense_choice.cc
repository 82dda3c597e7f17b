#include "core/plan/dense_choice.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/plan/objective.h"

namespace poseidon {

std::vector<DenseTensor> TensorsToSlice(const Question& question, const std::vector<TensorDecision>& decisions,
                                        const std::vector<std::vector<PricedOffer>>& offers) {
  std::vector<bool> covered(decisions.size());
  for (size_t i = 0; i < decisions.size(); ++i) {
    for (const PricedOffer& offer : offers[i]) {
      if (offer.scheme != decisions[i].scheme) continue;
      for (int other : offer.work.covers) covered[other] = true;
    }
  }
  const std::vector<MergedTensor>& profiled = question.profile.tensors;
  std::vector<DenseTensor> tensors;
  for (size_t i = 0; i < decisions.size(); ++i) {
    const bool may_share = i < question.may_share.size() && question.may_share[i];
    if (!may_share || decisions[i].scheme != Scheme::kAllreduce || profiled[i].base.order < 0 || covered[i]) continue;
    const Work& work = offers[i].front().work;
    tensors.push_back({static_cast<int>(i), work.bytes, std::max(0.0, profiled[i].ready_seconds), work.kind});
  }
  std::stable_sort(tensors.begin(), tensors.end(), [&](const DenseTensor& a, const DenseTensor& b) {
    return profiled[a.index].base.order < profiled[b.index].base.order;
  });
  return tensors;
}

namespace {

// The same gradients as in `slices`.
bool Covers(const std::vector<DenseSlice>& slices, const std::vector<DenseTensor>& tensors) {
  std::vector<int> now, in_force;
  for (const DenseTensor& tensor : tensors) now.push_back(tensor.index);
  for (const DenseSlice& slice : slices) in_force.insert(in_force.end(), slice.tensors.begin(), slice.tensors.end());
  std::sort(now.begin(), now.end());
  std::sort(in_force.begin(), in_force.end());
  return now == in_force;
}

}  // namespace

std::vector<DenseSlice> ChooseLayout(const LayoutQuestion& question, const DenseSettings& settings,
                                     const Tuning& tuning) {
  if (settings.method != DenseMethod::kAuto) return LayOut(settings, question.tensors, question.loaded->allreduce);
  // The load puts down to the network all that made steps longer, even ranks that come late by turns. A layout that
  // counts on a slow network waits for too much at a time, and leaves the wire idle where it is faster: so both count,
  // the network under load and with the bandwidth that was measured.
  StepModel loaded = *question.loaded, unloaded = *question.idle;
  if (!question.given) unloaded.allreduce.alpha *= 1 + (tuning.busy_alpha - 1) * unloaded.contention;
  const auto objective_of = [&](const std::vector<DenseSlice>& slices) {
    ApplyLayout(slices, &loaded);
    ApplyLayout(slices, &unloaded);
    return Objective({&loaded, &unloaded}, *question.choice, tuning);
  };
  std::vector<DenseSlice> chosen;
  double best = std::numeric_limits<double>::infinity();
  for (std::vector<DenseSlice>& layout :
       CandidateLayouts(question.tensors, {loaded.allreduce, unloaded.allreduce}, tuning)) {
    const double objective = objective_of(layout);
    if (objective >= best) continue;
    best = objective;
    chosen = std::move(layout);
  }
  if (!Covers(question.in_force, question.tensors)) return chosen;
  const double kept = objective_of(question.in_force);
  return kept - best < tuning.margin * kept ? question.in_force : chosen;
}

}  // namespace poseidon
