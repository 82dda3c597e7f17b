#include "core/model/step_model.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <unordered_map>

#include "core/base/bounds.h"

namespace poseidon {
namespace {

// Of a network under load, too.
constexpr double kMostModelAlpha = 1e6, kMostModelBeta = 1e3;

// Calls visit(number, least, most) for every number of the model, which may be const.
template <typename Model, typename Visit>
void VisitNumbers(Model& model, Visit visit) {
  for (auto* line : {&model.allreduce, &model.allgather}) {
    visit(line->alpha, 0, kMostModelAlpha);
    visit(line->beta, 0, kMostModelBeta);
  }
  visit(model.compute, 0, kMostSeconds);
  visit(model.contention, 0, 1);
  visit(model.fusion_bytes, 0, kMostBytes);
  visit(model.copy, 0, kMostModelBeta);
  for (auto& tensor : model.tensors) {
    visit(tensor.ready, -1, kMostSeconds);
    visit(tensor.allreduce_bytes, 0, kMostBytes);
    visit(tensor.gather_bytes, 0, kMostBytes);
    for (auto* seconds : {&tensor.cost.local, &tensor.cost.input, &tensor.cost.pack, &tensor.cost.rebuild}) {
      visit(*seconds, 0, kMostSeconds);
    }
  }
}

bool IsBounded(const StepModel& model) {
  bool bounded = true;
  VisitNumbers(model,
               [&](double value, double least, double most) { bounded = bounded && IsWithin(value, least, most); });
  return bounded;
}

struct Message {
  double ready;
  size_t tensor;  // the first, of a slice
  bool gather;
  double bytes;
  bool sent = false;
};

// Messages in the order in which backward makes them, with the times that this choice gives them. What is factored
// saves its local product and costs its packing, so everything after it comes earlier or later by that.
std::vector<Message> MakeMessages(const StepModel& model, const std::vector<Scheme>& schemes, double* compute) {
  std::vector<size_t> order(model.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return model.tensors[a].ready < model.tensors[b].ready; });
  std::vector<Message> messages;
  std::unordered_map<int, size_t> of_slice;  // index into messages
  double shift = 0;
  double previous = 0;
  for (size_t i : order) {
    const StepTensor& tensor = model.tensors[i];
    if (tensor.carrier >= 0 && schemes[tensor.carrier] != Scheme::kAllreduce) continue;
    const bool gather = schemes[i] != Scheme::kAllreduce;
    double ready = tensor.ready < 0 ? model.compute + shift : tensor.ready + shift;
    if (gather && tensor.ready >= 0) {
      shift += tensor.cost.pack - tensor.cost.local;
      ready = std::max(previous, ready - tensor.cost.local - tensor.cost.input + tensor.cost.pack);
    }
    if (!gather && model.sliced && tensor.copied) {
      shift += model.copy * tensor.allreduce_bytes;
      ready += model.copy * tensor.allreduce_bytes;
    }
    ready = std::max(0.0, ready);
    if (tensor.ready >= 0) previous = ready;
    if (!gather && model.sliced && tensor.slice >= 0) {
      const auto [it, first] = of_slice.emplace(tensor.slice, messages.size());
      if (!first) {
        Message& message = messages[it->second];
        message.ready = std::max(message.ready, ready);
        message.bytes += tensor.allreduce_bytes;
        continue;
      }
    }
    messages.push_back({ready, i, gather, gather ? tensor.gather_bytes : tensor.allreduce_bytes});
  }
  *compute = std::max(previous, model.compute + shift);
  std::stable_sort(messages.begin(), messages.end(),
                   [](const Message& a, const Message& b) { return a.ready < b.ready; });
  return messages;
}

// Below this share of the step, what the network changes is lost in the noise of everything else.
constexpr double kLeastShare = 0.1;

double StepUnder(const StepModel& model, const std::vector<Scheme>& schemes, const NetworkLoad& load) {
  return SimulateStep(UnderLoad(model, load), schemes).step;
}

}  // namespace

StepModel UnderLoad(const StepModel& model, const NetworkLoad& load) {
  StepModel slower = model;
  const double allreduce = Bounded(load.allreduce, kLeastLoad, kMostLoad);
  const double allgather = Bounded(load.allgather, kLeastLoad, kMostLoad);
  slower.allreduce.alpha *= allreduce;
  slower.allreduce.beta *= allreduce;
  slower.allgather.alpha *= allgather;
  slower.allgather.beta *= allgather;
  return slower;
}

StepModel Bounded(StepModel model) {
  VisitNumbers(model, [](double& value, double least, double most) { value = Bounded(value, least, most); });
  return model;
}

NetworkLoad LoadOf(const StepModel& model, const std::vector<Scheme>& schemes, double observed,
                   const NetworkLoad& before) {
  NetworkLoad load = before;
  std::vector<double*> deciding;
  for (double* kind : {&load.allreduce, &load.allgather}) {
    const double kept = *kind;
    *kind = kMostLoad;
    const double most = StepUnder(model, schemes, load);
    *kind = kLeastLoad;
    const double least = StepUnder(model, schemes, load);
    *kind = kept;
    if (most - least > kLeastShare * least) deciding.push_back(kind);
  }
  if (deciding.empty()) return load;
  double low = kLeastLoad, high = kMostLoad;
  for (int i = 0; i < 30; ++i) {  // the step grows with the load
    const double middle = (low + high) / 2;
    for (double* kind : deciding) *kind = middle;
    (StepUnder(model, schemes, load) < observed ? low : high) = middle;
  }
  return load;
}

StepEstimate SimulateStep(const StepModel& model, const std::vector<Scheme>& schemes) {
  if (!IsBounded(model)) return SimulateStep(Bounded(model), schemes);
  StepEstimate estimate;
  std::vector<Message> messages = MakeMessages(model, schemes, &estimate.compute);
  double channel_free = 0;
  double thread_free = 0;
  size_t first = 0;  // everything before it has been sent
  while (true) {
    while (first < messages.size() && messages[first].sent) ++first;
    if (first == messages.size()) break;
    const Message& head = messages[first];
    const StepTensor& head_tensor = model.tensors[head.tensor];
    const double begin = std::max(channel_free, head.ready);
    // What is ready by then and of the same kind goes along, as Horovod fuses it.
    std::vector<size_t> batch;
    double bytes = 0;
    for (size_t i = first; i < messages.size() && messages[i].ready <= begin; ++i) {
      const Message& message = messages[i];
      const StepTensor& tensor = model.tensors[message.tensor];
      if (message.sent || message.gather != head.gather) continue;
      if (head.gather ? tensor.gather_kind != head_tensor.gather_kind
                      : tensor.allreduce_kind != head_tensor.allreduce_kind)
        continue;
      if (!batch.empty() && ((model.sliced && !head.gather) || bytes + message.bytes > model.fusion_bytes)) continue;
      bytes += message.bytes;
      batch.push_back(i);
    }
    const double seconds = (head.gather ? model.allgather : model.allreduce).Seconds(bytes);
    channel_free = begin + seconds;
    estimate.channel += seconds;
    const bool gather = head.gather;
    for (size_t i : batch) {
      messages[i].sent = true;
      if (!gather) continue;
      const double work = model.tensors[messages[i].tensor].cost.rebuild;
      const double start = std::max(thread_free, channel_free);
      // While backward runs on the same cores, each takes the other's time.
      const double shared = std::clamp(estimate.compute - start, 0.0, work);
      const double delay = model.contention * shared;
      thread_free = start + work + delay;
      estimate.rebuild += work;
      estimate.compute += shared > 0 ? delay : 0;
      for (size_t later = first; later < messages.size() && delay > 0; ++later) {
        if (!messages[later].sent && messages[later].ready > start) messages[later].ready += delay;
      }
    }
  }
  estimate.step = std::max({estimate.compute, channel_free, thread_free});
  return estimate;
}

}  // namespace poseidon
