// Sufficient factor broadcasting (Poseidon, arXiv 1706.03292, section 3.2): the rows of x and d of a linear layer are
// gathered, and every rank rebuilds d^T x.
#include <cmath>

#include "core/model/cost_model.h"
#include "core/schemes/factor_layout.h"
#include "core/schemes/registry.h"

namespace poseidon {
namespace {

class Sfb final : public SchemeRule {
 public:
  const char* name() const override { return "sfb"; }

  bool Concerns(const MergedTensor& tensor) const override { return !IsTable(tensor) && !tensor.sparse; }

  std::string Obstacle(const MergedTensor& tensor, const Setting& setting) const override {
    const TensorProfile& base = tensor.base;
    if (IsTable(tensor)) return "it is an embedding table, for which there is row-sparse";
    if (tensor.sparse) return "the gradient is sparse";
    if (!base.is_linear_weight)
      return base.shape.size() == 2 && !tensor.reason.empty() ? tensor.reason : "not a linear weight";
    if (!tensor.sfb_allowed) return tensor.reason;
    if (base.shape.size() != 2 || NumElements(base.shape) == 0) return "weight of shape " + ShapeText(base.shape);
    if (!IsFloating(base.factor_dtype)) return std::string("factors are ") + Name(base.factor_dtype);
    const FactorLayout layout{base.shape[1], base.shape[0]};
    return CheckElementCount(tensor.global_rows, layout, setting.wire.traits.max_elements, base.name).message();
  }

  bool Promised(const MergedTensor& tensor) const override { return tensor.base.is_linear_weight; }
  bool Measured(const MergedTensor& tensor) const override { return tensor.global_rows > 0; }
  bool CoversBias() const override { return true; }

  Work WorkOf(const MergedTensor& tensor, const LayerCost& cost, const Setting& setting) const override {
    const DType wire = setting.wire.Gathered(tensor.base.factor_dtype);
    Work work;
    work.collective = Collective::kAllgather;
    work.bytes =
        SfbRowBytes(tensor.base.shape[0], tensor.base.shape[1], wire) * static_cast<double>(tensor.global_rows);
    work.kind = static_cast<uint8_t>(wire);
    work.lead = cost.input;
    work.before = cost.pack;
    work.after = cost.rebuild;
    work.memory_bytes = work.bytes;
    return work;
  }

  std::string ReasonByBytes(const MergedTensor& tensor, const Setting& setting, double) const override {
    const TensorProfile& base = tensor.base;
    const double break_even =
        SfbBreakEvenRows(base.shape[0], base.shape[1], SizeOf(setting.wire.Gathered(base.factor_dtype)),
                         SizeOf(setting.wire.Reduced(base.dtype)));
    return "bytes: " + std::to_string(tensor.global_rows) + " global rows, SFB sends fewer up to " +
           std::to_string(static_cast<int64_t>(std::floor(break_even)));
  }
};

}  // namespace

std::unique_ptr<const SchemeRule> MakeSfbRule() { return std::make_unique<Sfb>(); }

}  // namespace poseidon
