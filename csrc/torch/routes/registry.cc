#include "torch/routes/registry.h"

#include <map>

#include "torch/routes/factors_route.h"

namespace poseidon {

namespace {

std::map<std::string, MakeRoute>& AllRoutes() {
  static auto* routes = new std::map<std::string, MakeRoute>{
      {"sfb", MakeFactorsRoute},
      {"row-sparse", MakeFactorsRoute},
  };
  return *routes;
}

}  // namespace

MakeRoute FindRoute(Scheme scheme) {
  const auto found = AllRoutes().find(Name(scheme));
  return found == AllRoutes().end() ? nullptr : found->second;
}

void RegisterRoute(const std::string& scheme, MakeRoute make) { AllRoutes()[scheme] = make; }

}  // namespace poseidon
