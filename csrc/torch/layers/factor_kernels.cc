#include "torch/layers/factor_kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include <ATen/Parallel.h>

#include "core/schemes/row_scales.h"
#include "torch/dtypes.h"
#include "torch/layers/half_rows.h"

namespace poseidon {

namespace {

// float32 elements of the tile through which a 16-bit gradient is rebuilt: small enough for the cache.
constexpr int64_t kTileElements = 1 << 18;

std::atomic<int> threads_of_torch{0};

at::Tensor FactorX(const at::Tensor& gathered, const FactorLayout& layout) {
  return gathered.narrow(1, layout.x_offset(), layout.in_features);
}

at::Tensor FactorD(const at::Tensor& gathered, const FactorLayout& layout) {
  return gathered.narrow(1, layout.d_offset(), layout.out_features);
}

// -0.0, which a gradient that is multiplied by 0 has, is zero too.
uint64_t AllButSigns(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
    case at::kBFloat16:
      return 0x7fff7fff7fff7fff;
    case at::kFloat:
      return 0x7fffffff7fffffff;
    case at::kDouble:
      return 0x7fffffffffffffff;
    default:
      return ~uint64_t{0};
  }
}

bool HasScales(const at::Tensor& rows) { return HasRowScales(ToDType(rows.scalar_type())); }

// What the rows of a message are to be multiplied by, as a column: 2^x, 2^d or their product. Undefined if nothing is
// scaled.
at::Tensor ScalesOf(const at::Tensor& gathered, const FactorLayout& layout, bool of_x, bool of_d, at::ScalarType type) {
  if (!HasScales(gathered)) return at::Tensor();
  // Of float32. Only products that overflow anyway have more, and infinity times 0 would be NaN.
  constexpr int kLargest = 127;
  const auto* rows = gathered.const_data_ptr<at::Half>();
  at::Tensor scales = at::empty({gathered.size(0), 1}, at::dtype(at::kDouble));
  bool any = false;
  for (int64_t row = 0; row < gathered.size(0); ++row) {
    const RowScales of_row = ReadRowScales(rows + row * layout.row_elements(), layout);
    const int exponent = (of_x ? of_row.x : 0) + (of_d ? of_row.d : 0);
    any = any || exponent != 0;
    scales.mutable_data_ptr<double>()[row] = std::ldexp(1.0, std::min(exponent, kLargest));
  }
  return any ? scales.to(type) : at::Tensor();
}

}  // namespace

void NoteThreadsOfTorch() { threads_of_torch.store(at::get_num_threads(), std::memory_order_relaxed); }

void UseThreadsOfTorch() {
  thread_local int used = 0;
  const int wanted = threads_of_torch.load(std::memory_order_relaxed);
  if (wanted == used) return;
  used = wanted;
  at::init_num_threads();
}

void PackRows(const at::Tensor& x, const at::Tensor& d, const FactorLayout& layout, int64_t first,
              at::Tensor& message) {
  const at::Tensor rows = message.narrow(0, first, x.size(0));
  if (!HasScales(message)) {
    FactorX(rows, layout).copy_(x);
    FactorD(rows, layout).copy_(d);
    return;
  }
  const std::vector<int> x_exponents = WriteHalfRows(x, FactorX(rows, layout));
  const std::vector<int> d_exponents = WriteHalfRows(d, FactorD(rows, layout));
  auto* row = rows.mutable_data_ptr<at::Half>();
  for (size_t i = 0; i < x_exponents.size(); ++i, row += layout.row_elements()) {
    WriteRowScales(row, {x_exponents[i], d_exponents[i]}, layout);
  }
}

void RebuildWeight(const at::Tensor& gathered, const FactorLayout& layout, double scale, bool add,
                   at::Tensor& weight_grad) {
  if (gathered.size(0) == 0) {
    if (!add) weight_grad.zero_();
    return;
  }
  const at::ScalarType sum_type = AccumulateType(weight_grad.scalar_type());
  // No copies when the factors have that type already: the blocks of the gathered matrix are GEMM operands as they lie.
  const at::Tensor x = FactorX(gathered, layout).to(sum_type);
  const at::Tensor d = FactorD(gathered, layout).to(sum_type);
  const at::Tensor scales = ScalesOf(gathered, layout, /*of_x=*/true, /*of_d=*/true, sum_type);
  // In place, because these are copies: sums are never of float16.
  if (scales.defined()) (layout.in_features < layout.out_features ? x : d).mul_(scales);
  const at::Tensor d_t = d.t();
  if (weight_grad.scalar_type() == sum_type) {
    weight_grad.addmm_(d_t, x, /*beta=*/add ? 1 : 0, /*alpha=*/scale);
    return;
  }
  const int64_t step = std::max<int64_t>(1, kTileElements / std::max<int64_t>(1, layout.in_features));
  for (int64_t row = 0; row < layout.out_features; row += step) {
    const int64_t count = std::min(step, layout.out_features - row);
    at::Tensor target = weight_grad.narrow(0, row, count);
    at::Tensor tile = at::mm(d_t.narrow(0, row, count), x).mul_(scale);
    if (add) tile.add_(target);
    target.copy_(tile);
  }
}

void RebuildBias(const at::Tensor& gathered, const FactorLayout& layout, double scale, bool add,
                 at::Tensor& bias_grad) {
  const at::ScalarType sum_type = AccumulateType(bias_grad.scalar_type());
  at::Tensor d = FactorD(gathered, layout);
  const at::Tensor scales = ScalesOf(gathered, layout, /*of_x=*/false, /*of_d=*/true, sum_type);
  if (scales.defined()) d = at::mul(d, scales);
  at::Tensor sums = at::sum(d, /*dim=*/0, /*keepdim=*/false, sum_type);
  sums.mul_(scale);
  if (add) sums.add_(bias_grad);
  bias_grad.copy_(sums);
}

bool IsAllZero(const at::Tensor& tensor) {
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  int64_t left = static_cast<int64_t>(tensor.nbytes());
  const uint64_t mask = AllButSigns(tensor.scalar_type());
  constexpr int64_t kBlock = 4096;
  const auto word_at = [](const unsigned char* at, int64_t size) {
    uint64_t word = 0;
    std::memcpy(&word, at, static_cast<size_t>(size));
    return word;
  };
  while (left >= kBlock) {
    uint64_t any = 0;
    for (int64_t i = 0; i < kBlock; i += 8) any |= word_at(bytes + i, 8);
    if ((any & mask) != 0) return false;
    bytes += kBlock;
    left -= kBlock;
  }
  for (; left > 0; bytes += 8, left -= 8) {
    if ((word_at(bytes, std::min<int64_t>(8, left)) & mask) != 0) return false;
  }
  return true;
}

}  // namespace poseidon
