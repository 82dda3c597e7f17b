// Row-sparse: the touched rows of an embedding table, merged by id and gathered; every rank scatters them.
#include <cmath>

#include "core/model/cost_model.h"
#include "core/schemes/factor_layout.h"
#include "core/schemes/registry.h"

namespace poseidon {
namespace {

class RowSparse final : public SchemeRule {
 public:
  const char* name() const override { return "row-sparse"; }

  bool Concerns(const MergedTensor& tensor) const override { return IsTable(tensor); }

  std::string Obstacle(const MergedTensor& tensor, const Setting& setting) const override {
    const TensorProfile& base = tensor.base;
    if (!IsTable(tensor)) {
      return base.is_embedding ? "the table is the weight of linear calls too"
             : base.used       ? "not an embedding table"
                               : tensor.reason;
    }
    if (!tensor.sfb_allowed) return tensor.reason;
    if (base.shape.size() != 2 || NumElements(base.shape) == 0) return "table of shape " + ShapeText(base.shape);
    if (!IsFloating(base.factor_dtype)) return std::string("output gradients are ") + Name(base.factor_dtype);
    const FactorLayout layout{IdElements(setting.wire.Gathered(base.factor_dtype)), base.shape[1]};
    return CheckElementCount(tensor.global_unique_rows, layout, setting.wire.traits.max_elements, base.name).message();
  }

  bool Measured(const MergedTensor& tensor) const override { return tensor.global_rows > 0; }

  Work WorkOf(const MergedTensor& tensor, const LayerCost& cost, const Setting& setting) const override {
    const DType wire = setting.wire.Gathered(tensor.base.factor_dtype);
    Work work;
    work.collective = Collective::kAllgather;
    work.bytes = TableRowBytes(tensor.base.shape[1], wire) * static_cast<double>(tensor.global_unique_rows);
    work.kind = static_cast<uint8_t>(wire);
    work.lead = cost.input;
    work.before = cost.pack;
    work.after = cost.rebuild;
    work.memory_bytes = work.bytes;
    return work;
  }

  std::string ReasonByBytes(const MergedTensor& tensor, const Setting& setting, double otherwise) const override {
    const DType wire = setting.wire.Gathered(tensor.base.factor_dtype);
    const double row_bytes = RowSparseWireBytes(1, tensor.base.shape[1], wire, setting.size);
    return "bytes: " + std::to_string(tensor.global_unique_rows) +
           " merged global rows, row-sparse sends fewer up to " +
           std::to_string(static_cast<int64_t>(std::floor(otherwise / row_bytes)));
  }
};

}  // namespace

std::unique_ptr<const SchemeRule> MakeRowSparseRule() { return std::make_unique<RowSparse>(); }

}  // namespace poseidon
