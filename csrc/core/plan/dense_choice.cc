#include "core/plan/dense_choice.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

#include "core/model/cost_model.h"

namespace poseidon {

namespace {

// While ranks compute, and other threads find no core free, each hop of a message and of the negotiation before it
// waits for one. On 4 ranks with 2 cores the negotiation alone took 25 to 75 ms in Horovod's timeline, and a message of
// 1 MB 150 ms longer than between idle ranks, where the trials before found an alpha of 2 to 9 ms.
constexpr double kBusyAlpha = 15;

// In the order of backward.
std::vector<DenseTensor> TensorsToSlice(const MergedProfile& profile, const std::vector<TensorDecision>& decisions,
                                        const std::vector<bool>& may_share, bool fp16_wire) {
  std::unordered_map<std::string, size_t> factored_bias;
  for (size_t i = 0; i < decisions.size(); ++i) {
    if (decisions[i].scheme == Scheme::kSfb && !profile.tensors[i].base.bias.empty())
      factored_bias[profile.tensors[i].base.bias] = i;
  }
  std::vector<DenseTensor> tensors;
  for (size_t i = 0; i < decisions.size(); ++i) {
    const MergedTensor& merged = profile.tensors[i];
    if (!may_share[i] || decisions[i].scheme != Scheme::kAllreduce || merged.base.order < 0 ||
        factored_bias.count(decisions[i].name)) {
      continue;
    }
    const DType wire = AllreduceWireDType(merged.base.dtype, fp16_wire);
    const auto bytes = static_cast<double>(NumElements(merged.base.shape)) * static_cast<double>(SizeOf(wire));
    tensors.push_back({static_cast<int>(i), bytes, std::max(0.0, merged.ready_seconds), static_cast<uint8_t>(wire)});
  }
  std::stable_sort(tensors.begin(), tensors.end(), [&](const DenseTensor& a, const DenseTensor& b) {
    return profile.tensors[a.index].base.order < profile.tensors[b.index].base.order;
  });
  return tensors;
}

}  // namespace

std::vector<DenseSlice> ChooseLayout(const MergedProfile& profile, const std::vector<TensorDecision>& decisions,
                                     const std::vector<bool>& may_share, const SelectorSettings& settings,
                                     const DenseSettings& dense, const TimeInputs* inputs, StepPrediction* prediction) {
  if (settings.size <= 1) return {};
  const std::vector<DenseTensor> tensors = TensorsToSlice(profile, decisions, may_share, settings.fp16_wire);
  if (inputs == nullptr) return LayOut(dense, tensors, AlphaBeta{});
  const NetworkLoad load = prediction != nullptr && prediction->known ? prediction->load : inputs->load;
  StepModel unloaded = MakeStepModel(profile, decisions, settings, *inputs);
  StepModel loaded = UnderLoad(unloaded, load);
  if (!inputs->network_given) unloaded.allreduce.alpha *= 1 + (kBusyAlpha - 1) * inputs->contention;
  std::vector<Scheme> schemes;
  for (const TensorDecision& decision : decisions) schemes.push_back(decision.scheme);
  const auto estimate = [&](const std::vector<DenseSlice>& slices, StepModel* model) {
    ApplyLayout(slices, model);
    return SimulateStep(*model, schemes);
  };

  std::vector<DenseSlice> chosen;
  if (dense.method != DenseMethod::kAuto) {
    chosen = LayOut(dense, tensors, loaded.allreduce);
  } else {
    // The load puts down to the network all that made steps longer, even ranks that come late by turns. A layout that
    // counts on a slow network waits for too much at a time, and leaves the wire idle where it is faster: so both
    // count, the network under load and with the bandwidth that was measured.
    const auto objective_of = [&](const std::vector<DenseSlice>& slices) {
      return (Objective(estimate(slices, &loaded)) + Objective(estimate(slices, &unloaded))) / 2;
    };
    double best = std::numeric_limits<double>::infinity();
    for (std::vector<DenseSlice>& layout : CandidateLayouts(tensors, {loaded.allreduce, unloaded.allreduce})) {
      const double objective = objective_of(layout);
      if (objective >= best) continue;
      best = objective;
      chosen = std::move(layout);
    }
    // The one in force, if it still covers the same gradients.
    std::vector<int> now, in_force;
    for (const DenseTensor& tensor : tensors) now.push_back(tensor.index);
    for (const DenseSlice& slice : inputs->slices)
      in_force.insert(in_force.end(), slice.tensors.begin(), slice.tensors.end());
    std::sort(now.begin(), now.end());
    std::sort(in_force.begin(), in_force.end());
    if (now == in_force) {
      const double kept = objective_of(inputs->slices);
      if (kept - best < inputs->settings.margin * kept) chosen = inputs->slices;
    }
  }
  if (prediction != nullptr && prediction->known && dense.method != DenseMethod::kHorovod) {
    const double unexplained = prediction->chosen.step - prediction->simulated_step;
    prediction->chosen = estimate(chosen, &loaded);
    prediction->simulated_step = prediction->chosen.step;
    prediction->chosen.step += unexplained;
  }
  return chosen;
}

}  // namespace poseidon
