#include "core/model/cost_model.h"

#include "core/model/work.h"
#include "core/schemes/factor_layout.h"

namespace poseidon {
namespace {

// Every formula ends here, so equal totals give equal results and the selector's `<=` is exact (totals below 2^53).
double RingShare(double total_bytes, int size) { return size <= 1 ? 0.0 : total_bytes * (size - 1) / size; }

}  // namespace

double SentBytes(const Work& work, int size) {
  return RingShare((work.collective == Collective::kAllreduce ? 2 : 1) * work.bytes, size);
}

double SfbRowBytes(int64_t out_features, int64_t in_features, DType factor_dtype) {
  return static_cast<double>(out_features + in_features) * static_cast<double>(SizeOf(factor_dtype));
}

double TableRowBytes(int64_t dim, DType factor_dtype) {
  const FactorLayout layout{IdElements(factor_dtype), dim};
  return static_cast<double>(layout.row_elements()) * static_cast<double>(SizeOf(factor_dtype));
}

double SparseRowBytes(int64_t dim, DType dtype) {
  return 8.0 + static_cast<double>(dim) * static_cast<double>(SizeOf(dtype));
}

double AllreduceWireBytes(int64_t elements, DType wire_dtype, int size) {
  return RingShare(2.0 * static_cast<double>(elements) * static_cast<double>(SizeOf(wire_dtype)), size);
}

double AllgatherWireBytes(int64_t total_bytes_all_ranks, int size) {
  return RingShare(static_cast<double>(total_bytes_all_ranks), size);
}

double SfbWireBytes(int64_t out_features, int64_t in_features, int64_t global_rows, DType factor_dtype, int size) {
  return RingShare(SfbRowBytes(out_features, in_features, factor_dtype) * static_cast<double>(global_rows), size);
}

double RowSparseWireBytes(int64_t global_unique_rows, int64_t dim, DType factor_dtype, int size) {
  return RingShare(TableRowBytes(dim, factor_dtype) * static_cast<double>(global_unique_rows), size);
}

double SparseAllgatherWireBytes(int64_t global_rows, int64_t dim, DType dtype, int size) {
  return RingShare(SparseRowBytes(dim, dtype) * static_cast<double>(global_rows), size);
}

double SfbBreakEvenRows(int64_t out_features, int64_t in_features, int64_t factor_bytes, int64_t gradient_bytes) {
  const double m = static_cast<double>(out_features);
  const double n = static_cast<double>(in_features);
  if (m + n == 0) return 0;
  return 2 * m * n * static_cast<double>(gradient_bytes) / ((m + n) * static_cast<double>(factor_bytes));
}

}  // namespace poseidon
