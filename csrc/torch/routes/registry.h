// The routes of schemes that the plan can choose instead of an allreduce. One line per scheme in registry.cc.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/plan/profile.h"
#include "core/schemes/scheme.h"
#include "torch/routes/route.h"

namespace poseidon {

// What a route is made from. The same on all ranks, but for the tensors themselves.
struct RouteRequest {
  RouteContext& context;
  Parameter& parameter;
  const MergedTensor& merged;
  std::vector<Parameter>& all;  // to find, by name, what travels along
};

using MakeRoute = std::shared_ptr<Route> (*)(const RouteRequest&);

// Null: the scheme is an allreduce, or an allgather of a sparse gradient, and the layout has its route.
MakeRoute FindRoute(Scheme scheme);
// At start-up, before any session. The name is the scheme's (core/schemes).
void RegisterRoute(const std::string& scheme, MakeRoute make);

}  // namespace poseidon
