#include "core/model/cost_model.h"

#include "core/schemes/factor_layout.h"

namespace poseidon {
namespace {

// Every formula ends here, so equal totals give equal results and the selector's `<=` is exact (totals below 2^53).
double RingShare(double total_bytes, int size) { return size <= 1 ? 0.0 : total_bytes * (size - 1) / size; }

}  // namespace

DType AllreduceWireDType(DType gradient, bool fp16_wire) {
  if (fp16_wire && IsFloating(gradient)) return DType::kFloat16;
  return gradient == DType::kBFloat16 ? DType::kFloat32 : gradient;
}

DType FactorWireDType(DType factor, bool fp16_wire) {
  return fp16_wire && IsFloating(factor) ? DType::kFloat16 : factor;
}

double AllreduceWireBytes(int64_t elements, DType wire_dtype, int size) {
  return RingShare(2.0 * static_cast<double>(elements) * static_cast<double>(SizeOf(wire_dtype)), size);
}

double AllgatherWireBytes(int64_t total_bytes_all_ranks, int size) {
  return RingShare(static_cast<double>(total_bytes_all_ranks), size);
}

double SfbWireBytes(int64_t out_features, int64_t in_features, int64_t global_rows, DType factor_dtype, int size) {
  const double row_bytes = static_cast<double>(out_features + in_features) * static_cast<double>(SizeOf(factor_dtype));
  return RingShare(row_bytes * static_cast<double>(global_rows), size);
}

double RowSparseWireBytes(int64_t global_unique_rows, int64_t dim, DType factor_dtype, int size) {
  const FactorLayout layout{IdElements(factor_dtype), dim};
  const double row_bytes = static_cast<double>(layout.row_elements()) * static_cast<double>(SizeOf(factor_dtype));
  return RingShare(row_bytes * static_cast<double>(global_unique_rows), size);
}

double SparseAllgatherWireBytes(int64_t global_rows, int64_t dim, DType dtype, int size) {
  const double row_bytes = 8.0 + static_cast<double>(dim) * static_cast<double>(SizeOf(dtype));
  return RingShare(row_bytes * static_cast<double>(global_rows), size);
}

double SfbBreakEvenRows(int64_t out_features, int64_t in_features, int64_t factor_bytes, int64_t gradient_bytes) {
  const double m = static_cast<double>(out_features);
  const double n = static_cast<double>(in_features);
  if (m + n == 0) return 0;
  return 2 * m * n * static_cast<double>(gradient_bytes) / ((m + n) * static_cast<double>(factor_bytes));
}

}  // namespace poseidon
