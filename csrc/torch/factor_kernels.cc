#include "torch/factor_kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <ATen/Parallel.h>

#include "torch/dtypes.h"

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
    case at::kBFloat16: return 0x7fff7fff7fff7fff;
    case at::kFloat: return 0x7fffffff7fffffff;
    case at::kDouble: return 0x7fffffffffffffff;
    default: return ~uint64_t{0};
  }
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

void PackRows(const at::Tensor& x, const at::Tensor& d, const FactorLayout& layout, int64_t first, at::Tensor& message) {
  at::Tensor rows = message.narrow(0, first, x.size(0));
  rows.narrow(1, layout.x_offset(), layout.in_features).copy_(x);
  rows.narrow(1, layout.d_offset(), layout.out_features).copy_(d);
}

void RebuildWeight(const at::Tensor& gathered, const FactorLayout& layout, double scale, bool add, at::Tensor& weight_grad) {
  if (gathered.size(0) == 0) {
    if (!add) weight_grad.zero_();
    return;
  }
  const at::ScalarType sum_type = AccumulateType(weight_grad.scalar_type());
  // No copies when the factors have that type already: the blocks of the gathered matrix are GEMM operands as they lie.
  const at::Tensor x = FactorX(gathered, layout).to(sum_type);
  const at::Tensor d_t = FactorD(gathered, layout).to(sum_type).t();
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

void RebuildBias(const at::Tensor& gathered, const FactorLayout& layout, double scale, bool add, at::Tensor& bias_grad) {
  at::Tensor sums = at::sum(FactorD(gathered, layout), /*dim=*/0, /*keepdim=*/false, AccumulateType(bias_grad.scalar_type()));
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
