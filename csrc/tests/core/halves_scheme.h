// A scheme that only a test has: its whole core half, in the one file that a scheme of the product has in
// core/schemes. The gradient of a weight is cut in two; each half goes to one half of the ranks, and both are gathered.
// Its route (tests/torch/halves_route.h) keeps to the two halves, but has them reduced by allreduces.
#pragma once

#include <memory>
#include <string>

#include "core/schemes/registry.h"

namespace poseidon {

class Halves final : public SchemeRule {
 public:
  const char* name() const override { return "halves"; }
  bool Concerns(const MergedTensor& tensor) const override { return !tensor.sparse; }
  std::string Obstacle(const MergedTensor& tensor, const Setting& setting) const override {
    if (setting.size % 2 != 0) return "the ranks cannot be halved";
    return NumElements(tensor.base.shape) % 2 != 0 ? "its elements cannot be halved" : "";
  }
  Work WorkOf(const MergedTensor& tensor, const LayerCost& cost, const Setting& setting) const override {
    Work work;
    work.collective = Collective::kAllgather;
    work.bytes = work.memory_bytes =
        0.5 * static_cast<double>(NumElements(tensor.base.shape) * SizeOf(tensor.base.dtype) * setting.size);
    work.own = cost.local;
    work.before = work.after = 1e-3;
    return work;
  }
};

inline std::unique_ptr<const SchemeRule> MakeHalvesRule() { return std::make_unique<Halves>(); }

}  // namespace poseidon
