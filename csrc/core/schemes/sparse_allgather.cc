// Sparse allgather: values and indices of a sparse gradient, as the transport gathers them.
#include "core/model/cost_model.h"
#include "core/schemes/registry.h"

namespace poseidon {
namespace {

class SparseAllgather final : public SchemeRule {
 public:
  const char* name() const override { return "sparse_allgather"; }
  bool plain() const override { return true; }
  bool can_be_asked_for() const override { return false; }
  bool Concerns(const MergedTensor& tensor) const override { return tensor.sparse; }
  std::string Obstacle(const MergedTensor& tensor, const Setting&) const override {
    return tensor.sparse ? "" : "the gradient is not sparse";
  }
  // Rows are known of tables only.
  Work WorkOf(const MergedTensor& tensor, const LayerCost& cost, const Setting&) const override {
    Work work;
    work.collective = Collective::kAllgather;
    const int64_t dim = tensor.base.shape.size() == 2 ? tensor.base.shape[1] : 0;
    work.bytes = SparseRowBytes(dim, tensor.base.dtype) * static_cast<double>(tensor.global_rows);
    work.kind = static_cast<uint8_t>(tensor.base.dtype);
    work.own = cost.local;
    return work;
  }
};

}  // namespace

std::unique_ptr<const SchemeRule> MakeSparseAllgatherRule() { return std::make_unique<SparseAllgather>(); }

}  // namespace poseidon
