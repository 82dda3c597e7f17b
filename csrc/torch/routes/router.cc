#include "torch/routes/router.h"

#include <algorithm>
#include <map>
#include <utility>

#include "torch/routes/group_route.h"
#include "torch/routes/parts_route.h"
#include "torch/routes/pool_route.h"
#include "torch/routes/registry.h"
#include "torch/routes/sparse_route.h"
#include "torch/routes/whole_route.h"

namespace poseidon {

Router::Router(RouteContext& context, std::vector<Parameter>& parameters)
    : context_(context),
      parameters_(parameters),
      scheme_(parameters.size()),
      own_(parameters.size()),
      sparse_(parameters.size()),
      dense_(parameters.size()) {
  LayOut(Plan{});
  ChooseAll();
}

void Router::LayOut(const Plan& plan) {
  slices_ = plan.slices;
  method_ = plan.dense_method;
  std::fill(dense_.begin(), dense_.end(), nullptr);
  for (const std::vector<int>& group : context_.options.groups) {
    std::vector<Parameter*> members;
    for (int index : group) members.push_back(&parameters_[index]);
    const auto route = std::make_shared<GroupRoute>(context_, std::move(members));
    for (int index : group) dense_[index] = route;
  }
  std::vector<PartsLayout::Item> parts;
  for (size_t number = 0; number < slices_.size(); ++number) {
    const DenseSlice& slice = slices_[number];
    if (method_ == DenseMethod::kPriority) {
      parts.push_back({&parameters_[slice.tensors.front()], slice.part, slice.parts});
    } else if (slice.tensors.size() == 1) {
      const int index = slice.tensors.front();
      dense_[index] = std::make_shared<WholeRoute>(context_, parameters_[index], /*planned=*/true);
    } else {
      std::vector<Parameter*> members;
      for (int index : slice.tensors) members.push_back(&parameters_[index]);
      const auto route = std::make_shared<PoolRoute>(context_, std::move(members), static_cast<int>(number));
      for (int index : slice.tensors) dense_[index] = route;
    }
  }
  if (!parts.empty()) {
    for (const auto& route : PartsLayout::MakeRoutes(context_, std::move(parts)))
      dense_[route->members().front()->index] = route;
  }
  for (Parameter& p : parameters_) {
    auto& route = dense_[p.index];
    if (!route) route = std::make_shared<WholeRoute>(context_, p, /*planned=*/false);
  }
}

void Router::Choose(Parameter& p) {
  if (p.agreed.sparse && !sparse_[p.index]) sparse_[p.index] = std::make_shared<SparseRoute>(context_, p);
  if (!p.agreed.sparse) sparse_[p.index] = nullptr;
  for (const auto& route : {scheme_[p.index], sparse_[p.index], dense_[p.index]}) {
    if (!route) continue;
    p.route = route;
    break;
  }
}

void Router::ChooseAll() {
  for (Parameter& p : parameters_) Choose(p);
  NoteGathers();
}

void Router::NoteGathers() {
  context_.gathers =
      std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& each) { return each.route->gathers(); });
}

bool Router::HasOwnScheme(const Parameter& p) const {
  return scheme_[p.index] && scheme_[p.index]->members().front() == &p;
}

bool Router::Changes(const Parameter& p, const Plan& plan) const {
  const Scheme next = plan.decisions[p.index].scheme;
  const bool own = FindRoute(next) != nullptr;
  return own != HasOwnScheme(p) || (own && next != own_[p.index]);
}

void Router::GiveUp(Parameter& p) {
  const std::shared_ptr<Route> route = scheme_[p.index];
  route->Retire();
  for (Parameter* member : route->members()) {
    scheme_[member->index] = nullptr;
    Choose(*member);
  }
  NoteGathers();
}

void Router::Follow(const Plan& plan, const MergedProfile& merged) {
  for (Parameter& p : parameters_) {
    if (HasOwnScheme(p) && Changes(p, plan)) GiveUp(p);
  }
  if (plan.slices != slices_ || plan.dense_method != method_) LayOut(plan);
  for (Parameter& p : parameters_) {
    const MakeRoute make = FindRoute(plan.decisions[p.index].scheme);
    if (make == nullptr || scheme_[p.index]) continue;
    const std::shared_ptr<Route> route = make({context_, p, merged.tensors[p.index], parameters_});
    for (const Parameter* member : route->members()) scheme_[member->index] = route;
    own_[p.index] = plan.decisions[p.index].scheme;
  }
  ChooseAll();
}

void Router::Abandon() {
  // Several parameters have one route.
  std::map<std::shared_ptr<Route>, std::shared_ptr<Route>> successors;
  for (auto* routes : {&scheme_, &sparse_, &dense_}) {
    for (std::shared_ptr<Route>& route : *routes) {
      if (!route) continue;
      std::shared_ptr<Route>& successor = successors[route];
      if (!successor) successor = route->Successor();
      route = successor;
    }
  }
  ChooseAll();
}

void Router::EndStep() {
  ForEach([](Route& route) { route.EndStep(); });
}

void Router::ForEach(const std::function<void(Route&)>& visit) const {
  for (const auto* routes : {&scheme_, &sparse_, &dense_}) {
    for (const Parameter& p : parameters_) {
      const std::shared_ptr<Route>& route = (*routes)[p.index];
      if (route && route->members().front() == &p) visit(*route);
    }
  }
}

}  // namespace poseidon
