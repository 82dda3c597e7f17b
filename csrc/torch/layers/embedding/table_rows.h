// The rows of an embedding table that calls touch: merging them by id before they are sent, and adding up what was
// gathered. Plain loops with float32 sums (float64 for float64), also for 16-bit rows. No state; callers hold what
// needs holding.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "core/base/status.h"
#include "core/schemes/factor_layout.h"
#include "core/schemes/id_slots.h"

namespace poseidon {

// What one call adds to the table's gradient: coefficient[i] * d[source[i]] to row ids[i], for every i.
struct TableRows {
  at::Tensor ids;                   // n, int64, contiguous
  at::Tensor d;                     // of the outputs: B x D, contiguous
  std::vector<int64_t> source;      // by i; empty: i itself
  std::vector<double> coefficient;  // by i; empty: 1
  int64_t padding = -1;             // ids of this value add nothing
  bool sparse = false;              // the call asked for a sparse gradient
};

// scale_grad_by_freq: divides by how often the id occurs in the call, padding included, as PyTorch does.
void DivideByFrequency(TableRows* rows);

// Slot of each i, new ones added to *slots; -1 for padding. kInvalidArgument for an id that is no row of the table;
// *slots is then as it was.
Status AssignSlots(const TableRows& rows, int64_t table_rows, IdSlots* slots, std::vector<int64_t>* slot_of);

// sums[slot_of[i]] += coefficient[i] * d[source[i]]. sums: float32 or float64, with unit stride within a row.
void AddToSlots(const TableRows& rows, const std::vector<int64_t>& slot_of, const at::Tensor& sums);

// Writes ids into the first rows of a message.
void WriteIds(const std::vector<uint32_t>& ids, const at::Tensor& message);

// The rows of a gathered matrix, by id. Group g has id ids[g] and the rows rows[begins[g]] to rows[begins[g + 1]], in
// gathered order.
struct RowGroups {
  std::vector<uint32_t> ids;  // ascending
  std::vector<int64_t> begins;
  std::vector<uint32_t> rows;
};

// kInternal for an id that is no row of the table.
Status GroupRows(const at::Tensor& gathered, int64_t table_rows, RowGroups* groups);

// target[row] = scale * the sum of each group's d, or += where add; row is the group's id, or its number where !by_id.
// Rows of no group are left alone. Each sum is made by one thread in gathered order: the same bits on every rank.
void SumGroups(const at::Tensor& gathered, const FactorLayout& layout, const RowGroups& groups, double scale, bool add,
               bool by_id, const at::Tensor& target);

// target[id] = 0 for all of them.
void ZeroRows(const std::vector<uint32_t>& ids, const at::Tensor& target);

// False if one of a few rows spread over the table holds something although it is not one of `ids` (ascending).
bool LooksZeroElsewhere(const std::vector<uint32_t>& ids, const at::Tensor& target);

}  // namespace poseidon
