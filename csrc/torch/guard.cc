#include "torch/guard.h"

#include <algorithm>
#include <limits>

namespace poseidon {

namespace {

constexpr uint64_t kProbeSeed = 0x706f7365;

double Epsilon(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return 1.0 / (1 << 10);
    case at::kBFloat16:
      return 1.0 / (1 << 7);
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

// Right factors differ by rounding; one wrong row of 256 shows as some 3e-2.
double Tolerance(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16 ? 1e-2 : 1e-3; }

}  // namespace

at::Tensor RandomProbe(int64_t elements, const at::TensorOptions& options) {
  auto generator = at::detail::createCPUGenerator(kProbeSeed);
  return at::randn({elements}, generator, options);
}

at::ScalarType Coarser(at::ScalarType a, at::ScalarType b) { return Epsilon(a) > Epsilon(b) ? a : b; }

bool Agree(const at::Tensor& got, const at::Tensor& expected, const at::Tensor& magnitude, at::ScalarType type) {
  const double error = (got - expected).norm().item<double>();
  const double scale = std::max(got.norm().item<double>(), expected.norm().item<double>());
  return error <= Tolerance(type) * scale + 16 * Epsilon(type) * magnitude.norm().item<double>();
}

bool AllFinite(const at::Tensor& sums) { return at::isfinite(sums).all().item<bool>(); }

}  // namespace poseidon
