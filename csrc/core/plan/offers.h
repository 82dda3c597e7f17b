// What every scheme offers for every tensor of a profile, and the step model made of it. Pure functions, any thread.
#pragma once

#include <string>
#include <vector>

#include "core/model/network_calibration.h"
#include "core/model/step_model.h"
#include "core/plan/decision.h"
#include "core/plan/dense_layout.h"
#include "core/plan/profile.h"
#include "core/schemes/registry.h"

namespace poseidon {

// What ranks have measured and agreed on, besides the profile.
struct Measured {
  NetworkModel network;
  bool network_given = false;  // by the user, who is taken at his word, so it is what a step has
  double contention = 0;       // StepModel's, as is copy
  double copy = 0;
  std::vector<LayerCost> costs;  // one per tensor; missing ones count as zeros
};

struct PricedOffer {
  Scheme scheme;
  std::string obstacle;  // empty: it can carry the tensor
  Work work;             // if it can
};

// Of the schemes that concern the tensor, the plain one that is possible first, then in the order of the registry.
std::vector<PricedOffer> OffersOf(const MergedTensor& tensor, const LayerCost& cost, const Setting& setting);

// By tensor. `covers` is filled in.
std::vector<std::vector<PricedOffer>> OffersOf(const MergedProfile& profile, const std::vector<LayerCost>& costs,
                                               const Setting& setting);

// A step model whose offers are those that are possible, and whose they are.
struct OfferedModel {
  StepModel model;
  std::vector<std::vector<Scheme>> schemes;  // by tensor and offer

  // Of tensor i; -1 if it is not offered.
  int IndexOf(size_t i, Scheme scheme) const;
  // What is not offered counts as plain.
  Choice ChoiceOf(const std::vector<Scheme>& chosen) const;
};

// The step as it would be with everything plain and the network idle, not sliced.
OfferedModel MakeStepModel(const MergedProfile& profile, const std::vector<std::vector<PricedOffer>>& offers,
                           const Measured& measured, double fusion_bytes);

void ApplyLayout(const std::vector<DenseSlice>& slices, StepModel* model);

}  // namespace poseidon
