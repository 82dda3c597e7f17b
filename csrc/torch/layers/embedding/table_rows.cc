#include "torch/layers/embedding/table_rows.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "torch/dtypes.h"
#include "torch/layers/factor_kernels.h"

namespace poseidon {

namespace {

template <typename Sum, typename Value>
void AddToSlotsOf(const TableRows& rows, const std::vector<int64_t>& slot_of, const at::Tensor& sums) {
  const int64_t dim = rows.d.size(1);
  const int64_t stride = sums.stride(0);
  const Value* d = rows.d.const_data_ptr<Value>();
  Sum* out = sums.data_ptr<Sum>();
  for (size_t i = 0; i < slot_of.size(); ++i) {
    if (slot_of[i] < 0) continue;
    const Value* from = d + (rows.source.empty() ? static_cast<int64_t>(i) : rows.source[i]) * dim;
    Sum* to = out + slot_of[i] * stride;
    if (rows.coefficient.empty()) {
      for (int64_t j = 0; j < dim; ++j) to[j] += static_cast<Sum>(from[j]);
    } else {
      const Sum coefficient = static_cast<Sum>(rows.coefficient[i]);
      for (int64_t j = 0; j < dim; ++j) to[j] += coefficient * static_cast<Sum>(from[j]);
    }
  }
}

template <typename Wire, typename Grad>
void SumGroupsOf(const at::Tensor& gathered, const FactorLayout& layout, const RowGroups& groups, double scale,
                 bool add, bool by_id, const at::Tensor& target) {
  using Sum = std::conditional_t<std::is_same_v<Grad, double>, double, float>;
  const int64_t dim = layout.out_features;
  const Wire* wire = gathered.const_data_ptr<Wire>();
  Grad* out = target.data_ptr<Grad>();
  const Sum factor = static_cast<Sum>(scale);
  constexpr int64_t kElementsPerTask = 1 << 15;
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, dim));
  at::parallel_for(0, static_cast<int64_t>(groups.ids.size()), grain, [&](int64_t begin, int64_t end) {
    std::vector<Sum> sum(dim);
    for (int64_t group = begin; group < end; ++group) {
      std::fill(sum.begin(), sum.end(), Sum{0});
      for (int64_t i = groups.begins[group]; i < groups.begins[group + 1]; ++i) {
        const Wire* d = wire + groups.rows[i] * layout.row_elements() + layout.d_offset();
        for (int64_t j = 0; j < dim; ++j) sum[j] += static_cast<Sum>(d[j]);
      }
      Grad* row = out + (by_id ? static_cast<int64_t>(groups.ids[group]) : group) * dim;
      if (add) {
        for (int64_t j = 0; j < dim; ++j) row[j] = static_cast<Grad>(static_cast<Sum>(row[j]) + factor * sum[j]);
      } else {
        for (int64_t j = 0; j < dim; ++j) row[j] = static_cast<Grad>(factor * sum[j]);
      }
    }
  });
}

template <typename Wire>
void SumGroupsFrom(const at::Tensor& gathered, const FactorLayout& layout, const RowGroups& groups, double scale,
                   bool add, bool by_id, const at::Tensor& target) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, target.scalar_type(), "SumGroups", [&] {
    SumGroupsOf<Wire, scalar_t>(gathered, layout, groups, scale, add, by_id, target);
  });
}

}  // namespace

void DivideByFrequency(TableRows* rows) {
  const int64_t* ids = rows->ids.const_data_ptr<int64_t>();
  const int64_t count = rows->ids.numel();
  IdSlots slots;
  std::vector<int64_t> frequency;
  std::vector<size_t> slot_of(count);
  for (int64_t i = 0; i < count; ++i) {
    slot_of[i] = slots.SlotOf(static_cast<uint32_t>(ids[i]));
    if (slot_of[i] == frequency.size()) frequency.push_back(0);
    ++frequency[slot_of[i]];
  }
  if (rows->coefficient.empty()) rows->coefficient.assign(count, 1.0);
  for (int64_t i = 0; i < count; ++i) rows->coefficient[i] /= static_cast<double>(frequency[slot_of[i]]);
}

Status AssignSlots(const TableRows& rows, int64_t table_rows, IdSlots* slots, std::vector<int64_t>* slot_of) {
  const int64_t* ids = rows.ids.const_data_ptr<int64_t>();
  slot_of->resize(rows.ids.numel());
  for (size_t i = 0; i < slot_of->size(); ++i) {
    if (ids[i] >= 0 && ids[i] < table_rows) continue;
    return Status::InvalidArgument("id " + std::to_string(ids[i]) + " is no row of the table, which has " +
                                   std::to_string(table_rows));
  }
  for (size_t i = 0; i < slot_of->size(); ++i) {
    (*slot_of)[i] = ids[i] == rows.padding ? -1 : static_cast<int64_t>(slots->SlotOf(static_cast<uint32_t>(ids[i])));
  }
  return Status::OK();
}

void AddToSlots(const TableRows& rows, const std::vector<int64_t>& slot_of, const at::Tensor& sums) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.d.scalar_type(), "AddToSlots", [&] {
    sums.scalar_type() == at::kDouble ? AddToSlotsOf<double, scalar_t>(rows, slot_of, sums)
                                      : AddToSlotsOf<float, scalar_t>(rows, slot_of, sums);
  });
}

void WriteIds(const std::vector<uint32_t>& ids, const at::Tensor& message) {
  const DType dtype = ToDType(message.scalar_type());
  auto* row = static_cast<unsigned char*>(message.data_ptr());
  for (uint32_t id : ids) {
    WriteId(row, id, dtype);
    row += message.size(1) * SizeOf(dtype);
  }
}

Status GroupRows(const at::Tensor& gathered, int64_t table_rows, RowGroups* groups) {
  const DType dtype = ToDType(gathered.scalar_type());
  const auto* bytes = static_cast<const unsigned char*>(gathered.const_data_ptr());
  const int64_t count = gathered.size(0);
  std::vector<uint64_t> keys(count);  // id, then row: sorting keeps the gathered order within an id
  for (int64_t row = 0; row < count; ++row) {
    const uint32_t id = ReadId(bytes + row * gathered.size(1) * SizeOf(dtype), dtype);
    if (id >= table_rows) {
      return Status::Internal("a rank sent id " + std::to_string(id) + " for a table of " + std::to_string(table_rows) +
                              " rows");
    }
    keys[row] = uint64_t{id} << 32 | static_cast<uint64_t>(row);
  }
  std::sort(keys.begin(), keys.end());
  groups->ids.clear();
  groups->begins.clear();
  groups->rows.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<uint32_t>(keys[i] >> 32);
    if (i == 0 || id != groups->ids.back()) {
      groups->ids.push_back(id);
      groups->begins.push_back(i);
    }
    groups->rows[i] = static_cast<uint32_t>(keys[i]);
  }
  groups->begins.push_back(count);
  return Status::OK();
}

void SumGroups(const at::Tensor& gathered, const FactorLayout& layout, const RowGroups& groups, double scale, bool add,
               bool by_id, const at::Tensor& target) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, gathered.scalar_type(), "SumGroups", [&] {
    SumGroupsFrom<scalar_t>(gathered, layout, groups, scale, add, by_id, target);
  });
}

void ZeroRows(const std::vector<uint32_t>& ids, const at::Tensor& target) {
  auto* bytes = static_cast<unsigned char*>(target.data_ptr());
  const int64_t row_bytes = target.size(1) * static_cast<int64_t>(target.element_size());
  for (uint32_t id : ids) std::memset(bytes + id * row_bytes, 0, row_bytes);
}

bool LooksZeroElsewhere(const std::vector<uint32_t>& ids, const at::Tensor& target) {
  constexpr int64_t kSamples = 64;
  const int64_t step = std::max<int64_t>(1, target.size(0) / kSamples);
  for (int64_t row = 0; row < target.size(0); row += step) {
    if (std::binary_search(ids.begin(), ids.end(), static_cast<uint32_t>(row))) continue;
    if (!IsAllZero(target.select(0, row))) return false;
  }
  return true;
}

}  // namespace poseidon
