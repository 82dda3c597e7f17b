#include "torch/routes/registry.h"

#include <map>

#include "torch/routes/factors_route.h"

namespace poseidon {

namespace {

std::map<std::string, MakeRoute>& Routes() {
  static auto* routes = new std::map<std::string, MakeRoute>{
      {"sfb", MakeFactorsRoute},
      {"row-sparse", MakeFactorsRoute},
  };
  return *routes;
}

}  // namespace

MakeRoute FindRoute(const std::string& scheme) {
  const auto found = Routes().find(scheme);
  return found == Routes().end() ? nullptr : found->second;
}

void RegisterRoute(const std::string& scheme, MakeRoute make) { Routes()[scheme] = make; }

}  // namespace poseidon
