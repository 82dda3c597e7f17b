// Allreduce: the gradient itself, summed by the transport.
#include "core/model/cost_model.h"
#include "core/schemes/registry.h"

namespace poseidon {
namespace {

class Allreduce final : public SchemeRule {
 public:
  const char* name() const override { return "allreduce"; }
  bool plain() const override { return true; }
  std::string Obstacle(const MergedTensor& tensor, const Setting&) const override {
    return tensor.sparse ? "the gradient is sparse" : "";
  }
  Work WorkOf(const MergedTensor& tensor, const LayerCost& cost, const Setting& setting) const override {
    const DType wire = setting.wire.Reduced(tensor.base.dtype);
    Work work;
    work.bytes = static_cast<double>(NumElements(tensor.base.shape)) * static_cast<double>(SizeOf(wire));
    work.kind = static_cast<uint8_t>(wire);
    work.own = cost.local;
    return work;
  }
};

}  // namespace

std::unique_ptr<const SchemeRule> MakeAllreduceRule() { return std::make_unique<Allreduce>(); }

}  // namespace poseidon
