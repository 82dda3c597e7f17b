// Bytes that one rank SENDS for one gradient in one step, mean over ranks, with ring collectives. Poseidon's table 1
// and BestScheme (arXiv 1706.03292, section 3.2) restated from parameter server to ring: what a rank receives is the
// same, so one direction is enough to compare. Payload only: no negotiation, no framing, no flag column. Pure
// functions, any thread.
//
// Notation: M out features, N in features, global rows = the sum of all ranks' rows (K*P for equal K), P = size.
#ifndef POSEIDON_CORE_COST_MODEL_H_
#define POSEIDON_CORE_COST_MODEL_H_

#include <cstdint>
#include <vector>

#include "core/base/dtype.h"

namespace poseidon {

// Ring allreduce (reduce-scatter, then allgather): 2 B (P-1)/P, B = elements * SizeOf(wire_dtype).
double AllreduceWireBytes(int64_t elements, DType wire_dtype, int size);

// Ring allgather: T (P-1)/P, exact as the mean over ranks also for unequal blocks.
double AllgatherWireBytes(int64_t total_bytes_all_ranks, int size);

// Of what is gathered, one row: x and d of a layer, b (M+N); id, values and flag of a table's row, as they are sent
// (factor_layout.h); an 8-byte index and the values of a sparse gradient's row.
double SfbRowBytes(int64_t out_features, int64_t in_features, DType factor_dtype);
double TableRowBytes(int64_t dim, DType factor_dtype);
double SparseRowBytes(int64_t dim, DType dtype);

// Allgather of global_rows rows of x and d: b (M+N) global_rows (P-1)/P, b = SizeOf(factor_dtype).
double SfbWireBytes(int64_t out_features, int64_t in_features, int64_t global_rows, DType factor_dtype, int size);

// Global rows at which SFB and allreduce send the same: 2MN/(M+N) * gradient_bytes/factor_bytes. Does not depend on P.
// The arguments are wire bytes per element, factor_bytes > 0.
double SfbBreakEvenRows(int64_t out_features, int64_t in_features, int64_t factor_bytes, int64_t gradient_bytes);

// Allgather of the touched rows of an embedding table of `dim` columns. global_unique_rows: the sum over ranks of the
// rows that are left after each rank has merged equal ids.
double RowSparseWireBytes(int64_t global_unique_rows, int64_t dim, DType factor_dtype, int size);

// What the transport's own allgather of a sparse gradient sends: every row, equal ids not merged.
double SparseAllgatherWireBytes(int64_t global_rows, int64_t dim, DType dtype, int size);

}  // namespace poseidon

#endif  // POSEIDON_CORE_COST_MODEL_H_
