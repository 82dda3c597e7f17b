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
    visit(tensor.local, 0, kMostSeconds);
    for (auto& offer : tensor.offers) {
      visit(offer.bytes, 0, kMostBytes);
      visit(offer.memory_bytes, 0, kMostBytes);
      for (auto* seconds : {&offer.own, &offer.lead, &offer.before, &offer.after}) visit(*seconds, 0, kMostSeconds);
    }
  }
}

bool Covers(const StepModel& model, int tensor) {
  return tensor >= 0 && static_cast<size_t>(tensor) < model.tensors.size();
}

bool IsBounded(const StepModel& model) {
  bool bounded = true;
  VisitNumbers(model,
               [&](double value, double least, double most) { bounded = bounded && IsWithin(value, least, most); });
  for (const StepTensor& tensor : model.tensors) {
    bounded = bounded && !tensor.offers.empty();
    for (const Work& offer : tensor.offers) {
      for (int other : offer.covers) bounded = bounded && Covers(model, other);
    }
  }
  return bounded;
}

struct Message {
  double ready;
  Collective collective;
  uint8_t kind;
  bool sliced;
  double bytes;
  double after;
  bool sent = false;
};

// As it was when the profile was taken.
bool IsAsProfiled(const StepTensor& tensor, const Work& work) {
  return work.own == tensor.local && work.lead == 0 && work.before == 0;
}

// Messages in the order in which backward makes them, with the times that this choice gives them. A tensor that does
// not make its own gradient saves that time and costs its packing, so everything after it comes earlier or later by
// that.
std::vector<Message> MakeMessages(const StepModel& model, const Choice& choice, double* compute) {
  std::vector<size_t> order(model.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return model.tensors[a].ready < model.tensors[b].ready; });
  std::vector<bool> covered(model.tensors.size());
  for (size_t i : order) {
    for (int other : model.Chosen(choice, i).covers) covered[other] = true;
  }
  std::vector<Message> messages;
  std::unordered_map<int, size_t> of_slice;  // index into messages
  double shift = 0;
  double previous = 0;
  for (size_t i : order) {
    if (covered[i]) continue;
    const StepTensor& tensor = model.tensors[i];
    const Work& work = model.Chosen(choice, i);
    const bool in_slice = model.sliced && &work == &tensor.offers.front() && work.collective == Collective::kAllreduce;
    double ready = tensor.ready < 0 ? model.compute + shift : tensor.ready + shift;
    if (tensor.ready >= 0 && !IsAsProfiled(tensor, work)) {
      const double spared = tensor.local - work.own;
      shift += work.before - spared;
      ready = std::max(previous, ready - spared - work.lead + work.before);
    }
    if (in_slice && tensor.copied) {
      shift += model.copy * work.bytes;
      ready += model.copy * work.bytes;
    }
    ready = std::max(0.0, ready);
    if (tensor.ready >= 0) previous = ready;
    if (in_slice && tensor.slice >= 0) {
      const auto [it, first] = of_slice.emplace(tensor.slice, messages.size());
      if (!first) {
        Message& message = messages[it->second];
        message.ready = std::max(message.ready, ready);
        message.bytes += work.bytes;
        message.after += work.after;
        continue;
      }
    }
    messages.push_back({ready, work.collective, work.kind, in_slice, work.bytes, work.after});
  }
  *compute = std::max(previous, model.compute + shift);
  std::stable_sort(messages.begin(), messages.end(),
                   [](const Message& a, const Message& b) { return a.ready < b.ready; });
  return messages;
}

// The first message that is left and what the transport puts together with it: what is ready by then and of the same
// kind. Slices are put together already.
std::vector<size_t> Batch(const StepModel& model, const std::vector<Message>& messages, size_t first, double begin,
                          double* bytes) {
  const Message& head = messages[first];
  std::vector<size_t> batch;
  for (size_t i = first; i < messages.size() && messages[i].ready <= begin; ++i) {
    const Message& message = messages[i];
    if (message.sent || message.collective != head.collective || message.kind != head.kind) continue;
    if (!batch.empty() && (head.sliced || message.sliced || *bytes + message.bytes > model.fusion_bytes)) continue;
    *bytes += message.bytes;
    batch.push_back(i);
  }
  return batch;
}

}  // namespace

const Work& StepModel::Chosen(const Choice& choice, size_t i) const {
  const std::vector<Work>& offers = tensors[i].offers;
  const bool has = i < choice.size() && choice[i] > 0 && static_cast<size_t>(choice[i]) < offers.size();
  return offers[has ? static_cast<size_t>(choice[i]) : 0];
}

StepModel Bounded(StepModel model) {
  VisitNumbers(model, [](double& value, double least, double most) { value = Bounded(value, least, most); });
  for (StepTensor& tensor : model.tensors) {
    if (tensor.offers.empty()) tensor.offers.emplace_back();
    for (Work& offer : tensor.offers) {
      offer.covers.erase(
          std::remove_if(offer.covers.begin(), offer.covers.end(), [&](int other) { return !Covers(model, other); }),
          offer.covers.end());
    }
  }
  return model;
}

double SecondsAlone(const StepModel& model, const Work& work) {
  return model.network(work.collective).Seconds(work.bytes) + work.before + work.after + work.own;
}

StepEstimate SimulateStep(const StepModel& model, const Choice& choice) {
  if (!IsBounded(model)) return SimulateStep(Bounded(model), choice);
  StepEstimate estimate;
  std::vector<Message> messages = MakeMessages(model, choice, &estimate.compute);
  double channel_free = 0;
  double thread_free = 0;
  size_t first = 0;  // everything before it has been sent
  while (true) {
    while (first < messages.size() && messages[first].sent) ++first;
    if (first == messages.size()) break;
    const double begin = std::max(channel_free, messages[first].ready);
    double bytes = 0;
    const std::vector<size_t> batch = Batch(model, messages, first, begin, &bytes);
    const double seconds = model.network(messages[first].collective).Seconds(bytes);
    channel_free = begin + seconds;
    estimate.channel += seconds;
    for (size_t i : batch) {
      messages[i].sent = true;
      const double work = messages[i].after;
      if (work == 0) continue;
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
