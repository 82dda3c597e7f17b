#include "torch/compute_calibration.h"

#include <algorithm>
#include <thread>

#include <ATen/core/grad_mode.h>

#include "core/stats.h"
#include "torch/factor_kernels.h"

namespace poseidon {

namespace {

constexpr double kMostOperations = 5e8;    // of one timed product
constexpr int64_t kLeastTile = 1 << 12;    // elements of its output
constexpr int64_t kMostTile = 1 << 24;

template <typename Function>
double BestOfTwo(Function function) {
  function();  // threads, caches, memory
  double best = 0;
  for (int i = 0; i < 2; ++i) {
    const Clock::time_point begin = Clock::now();
    function();
    const double seconds = SecondsBetween(begin, Clock::now());
    best = i == 0 ? seconds : std::min(best, seconds);
  }
  return best;
}

// The part of an M x N output on which a product over `rows` rows is timed; both are cut by the same factor where they are large.
struct Tile {
  int64_t out;
  int64_t in;
  double scale;  // whole output / tile

  Tile(const LayerShape& shape, int64_t rows) : out(shape.out_features), in(shape.in_features) {
    const int64_t most = std::clamp(static_cast<int64_t>(kMostOperations / 2 / static_cast<double>(std::max<int64_t>(1, rows))),
                                    kLeastTile, kMostTile);
    while (out * in > most && (out > 1 || in > 1)) (out >= in ? out : in) = ((out >= in ? out : in) + 1) / 2;
    scale = static_cast<double>(shape.out_features) * static_cast<double>(shape.in_features) / static_cast<double>(out * in);
  }
};

// Ones: what lies in fresh memory may be denormal or NaN, which some units compute slowly.
at::Tensor Ones(int64_t rows, int64_t columns, at::ScalarType type) { return at::ones({rows, columns}, at::dtype(type)); }

LayerCost Measure(const LayerShape& shape) {
  LayerCost cost;
  if (shape.rows > 0) {
    const Tile tile(shape, shape.rows);
    const at::Tensor x = Ones(shape.rows, tile.in, shape.gradient);
    const at::Tensor d = Ones(shape.rows, tile.out, shape.gradient);
    cost.local = BestOfTwo([&] { d.t().mm(x); }) * tile.scale;
    const at::Tensor weight = Ones(tile.out, tile.in, shape.gradient);
    at::Tensor dx = Ones(shape.rows, tile.in, shape.gradient);
    cost.input = BestOfTwo([&] { at::mm_out(dx, d, weight); }) * tile.scale;

    const FactorLayout layout{tile.in, tile.out};
    at::Tensor message = Ones(shape.rows, layout.row_elements(), shape.wire);
    const double whole = static_cast<double>(shape.in_features + shape.out_features) / static_cast<double>(tile.in + tile.out);
    cost.pack = BestOfTwo([&] { PackRows(x, d, layout, 0, message); }) * whole;
  }
  if (shape.global_rows > 0) {
    const Tile tile(shape, shape.global_rows);
    const FactorLayout layout{tile.in, tile.out};
    const at::Tensor gathered = Ones(shape.global_rows, layout.row_elements(), shape.wire);
    at::Tensor gradient = Ones(tile.out, tile.in, shape.gradient);
    cost.rebuild = BestOfTwo([&] { RebuildWeight(gathered, layout, 1.0, /*add=*/false, gradient); }) * tile.scale;
  }
  return cost;
}

}  // namespace

const LayerCost& ComputeCalibration::CostOf(const LayerShape& shape) {
  auto it = costs_.find(shape);
  if (it == costs_.end()) {
    at::NoGradGuard no_grad;
    it = costs_.emplace(shape, Measure(shape)).first;
  }
  return it->second;
}

double ComputeCalibration::Contention() {
  if (contention_ >= 0) return contention_;
  at::NoGradGuard no_grad;
  constexpr int64_t kRows = 128, kFeatures = 1024;
  const at::Tensor x = Ones(kRows, kFeatures, at::kFloat);
  const auto product = [&x] { x.t().mm(x); };
  const double alone = BestOfTwo(product);
  const double together = BestOfTwo([&] {
    std::thread other([&] {
      at::NoGradGuard guard;
      product();
    });
    product();
    other.join();
  });
  contention_ = std::clamp(together / alone - 1, 0.0, 1.0);
  return contention_;
}

}  // namespace poseidon
