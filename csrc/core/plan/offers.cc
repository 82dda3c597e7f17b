#include "core/plan/offers.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace poseidon {

std::vector<PricedOffer> OffersOf(const MergedTensor& tensor, const LayerCost& cost, const Setting& setting) {
  std::vector<PricedOffer> offers;
  for (size_t place = 0; place < SchemeCount(); ++place) {
    const SchemeRule& rule = RuleOf(Scheme(place));
    if (!rule.Concerns(tensor)) continue;
    PricedOffer offer{Scheme(place), rule.Obstacle(tensor, setting), {}};
    if (offer.obstacle.empty()) offer.work = rule.WorkOf(tensor, cost, setting);
    const bool first = rule.plain() && offer.obstacle.empty();
    offers.insert(first ? offers.begin() : offers.end(), std::move(offer));
  }
  return offers;
}

std::vector<std::vector<PricedOffer>> OffersOf(const MergedProfile& profile, const std::vector<LayerCost>& costs,
                                               const Setting& setting) {
  std::unordered_map<std::string, int> by_name;
  for (size_t i = 0; i < profile.tensors.size(); ++i) by_name[profile.tensors[i].base.name] = static_cast<int>(i);
  std::vector<std::vector<PricedOffer>> all;
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    all.push_back(OffersOf(profile.tensors[i], i < costs.size() ? costs[i] : LayerCost{}, setting));
    const auto bias = by_name.find(profile.tensors[i].base.bias);
    if (bias == by_name.end()) continue;
    for (PricedOffer& offer : all.back()) {
      if (offer.obstacle.empty() && RuleOf(offer.scheme).CoversBias()) offer.work.covers = {bias->second};
    }
  }
  return all;
}

int OfferedModel::IndexOf(size_t i, Scheme scheme) const {
  const auto it = std::find(schemes[i].begin(), schemes[i].end(), scheme);
  return it == schemes[i].end() ? -1 : static_cast<int>(it - schemes[i].begin());
}

Choice OfferedModel::ChoiceOf(const std::vector<Scheme>& chosen) const {
  Choice choice(schemes.size(), 0);
  for (size_t i = 0; i < std::min(chosen.size(), choice.size()); ++i) choice[i] = std::max(0, IndexOf(i, chosen[i]));
  return choice;
}

OfferedModel MakeStepModel(const MergedProfile& profile, const std::vector<std::vector<PricedOffer>>& offers,
                           const Measured& measured, double fusion_bytes) {
  OfferedModel made;
  StepModel& model = made.model;
  model.allreduce = measured.network.allreduce;
  model.allgather = measured.network.allgather;
  model.compute = profile.compute_seconds;
  model.contention = measured.contention;
  model.copy = measured.copy;
  model.fusion_bytes = fusion_bytes;
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    StepTensor tensor;
    tensor.ready = profile.tensors[i].ready_seconds;
    if (i < measured.costs.size()) tensor.local = measured.costs[i].local;
    std::vector<Scheme> schemes;
    for (const PricedOffer& offer : offers[i]) {
      if (!offer.obstacle.empty()) continue;
      tensor.offers.push_back(offer.work);
      schemes.push_back(offer.scheme);
    }
    model.tensors.push_back(std::move(tensor));
    made.schemes.push_back(std::move(schemes));
  }
  model = Bounded(std::move(model));
  return made;
}

void ApplyLayout(const std::vector<DenseSlice>& slices, StepModel* model) {
  model->sliced = true;
  for (StepTensor& tensor : model->tensors) {
    tensor.slice = -1;
    tensor.copied = false;
  }
  for (size_t s = 0; s < slices.size(); ++s) {
    if (slices[s].parts > 1) continue;  // parts follow each other without a gap, as one message would
    for (int index : slices[s].tensors) {
      model->tensors[index].slice = static_cast<int>(s);
      model->tensors[index].copied = slices[s].tensors.size() > 1;
    }
  }
}

}  // namespace poseidon
