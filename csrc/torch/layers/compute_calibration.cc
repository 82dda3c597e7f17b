#include "torch/layers/compute_calibration.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include <ATen/core/grad_mode.h>

#include "core/engine/stats.h"
#include "torch/dtypes.h"
#include "torch/layers/embedding/table_rows.h"
#include "torch/layers/factor_kernels.h"

namespace poseidon {

namespace {

constexpr double kMostOperations = 5e8;  // of one timed product
constexpr int64_t kLeastTile = 1 << 12;  // elements of its output
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

// The part of an M x N output on which a product over `rows` rows is timed; both are cut by the same factor where they
// are large.
struct Tile {
  int64_t out;
  int64_t in;
  double scale;  // whole output / tile

  Tile(const LayerShape& shape, int64_t rows) : out(shape.out_features), in(shape.in_features) {
    const int64_t most =
        std::clamp(static_cast<int64_t>(kMostOperations / 2 / static_cast<double>(std::max<int64_t>(1, rows))),
                   kLeastTile, kMostTile);
    while (out * in > most && (out > 1 || in > 1)) (out >= in ? out : in) = ((out >= in ? out : in) + 1) / 2;
    scale = static_cast<double>(shape.out_features) * static_cast<double>(shape.in_features) /
            static_cast<double>(out * in);
  }
};

// Ones: what lies in fresh memory may be denormal or NaN, which some units compute slowly.
at::Tensor Ones(int64_t rows, int64_t columns, at::ScalarType type) {
  return at::ones({rows, columns}, at::dtype(type));
}

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
    const double whole =
        static_cast<double>(shape.in_features + shape.out_features) / static_cast<double>(tile.in + tile.out);
    cost.pack = BestOfTwo([&] { PackRows(x, d, layout, 0, message); }) * whole;
  }
  if (shape.global_rows > 0) {
    const Tile tile(shape, shape.global_rows);
    const FactorLayout layout{tile.in, tile.out};
    at::Tensor gathered = Ones(shape.global_rows, layout.row_elements(), shape.wire);
    const at::Tensor x = Ones(1, tile.in, shape.gradient), d = Ones(1, tile.out, shape.gradient);
    // As they arrive: scaled, where the real ones are.
    PackRows(x.expand({shape.global_rows, -1}), d.expand({shape.global_rows, -1}), layout, 0, gathered);
    at::Tensor gradient = Ones(tile.out, tile.in, shape.gradient);
    cost.rebuild = BestOfTwo([&] { RebuildWeight(gathered, layout, 1.0, /*add=*/false, gradient); }) * tile.scale;
  }
  return cost;
}

// Ids as calls have them: each of `unique` rows, spread over the table, again and again.
int64_t SpreadId(int64_t i, int64_t unique, int64_t table_rows) { return i % unique * (table_rows / unique); }

LayerCost MeasureTable(const LayerShape& shape) {
  LayerCost cost;
  const int64_t table_rows = shape.out_features, features = shape.in_features;
  const int64_t unique =
      std::clamp<int64_t>((shape.global_rows + shape.ranks - 1) / shape.ranks, 1, std::min(table_rows, shape.rows));
  TableRows rows;
  rows.ids = at::empty({shape.rows}, at::kLong);
  for (int64_t i = 0; i < shape.rows; ++i) rows.ids.data_ptr<int64_t>()[i] = SpreadId(i, unique, table_rows);
  rows.d = Ones(shape.rows, features, shape.gradient);
  cost.local = BestOfTwo([&] { at::embedding_dense_backward(rows.d, rows.ids, table_rows, -1, false); });

  const at::Tensor sums = Ones(unique, features, shape.gradient == at::kDouble ? at::kDouble : at::kFloat);
  cost.pack = BestOfTwo([&] {
    IdSlots slots;
    std::vector<int64_t> slot_of;
    if (AssignSlots(rows, table_rows, &slots, &slot_of).ok()) AddToSlots(rows, slot_of, sums);
  });

  const FactorLayout layout{IdElements(ToDType(shape.wire)), features};
  const at::Tensor gathered = Ones(shape.global_rows, layout.row_elements(), shape.wire);
  std::vector<uint32_t> ids;
  for (int64_t i = 0; i < shape.global_rows; ++i) ids.push_back(static_cast<uint32_t>(SpreadId(i, unique, table_rows)));
  WriteIds(ids, gathered);
  const at::Tensor gradient = at::zeros({table_rows, features}, at::dtype(shape.gradient));
  cost.rebuild = BestOfTwo([&] {
    RowGroups groups;
    if (!GroupRows(gathered, table_rows, &groups).ok()) return;
    ZeroRows(groups.ids, gradient);
    SumGroups(gathered, layout, groups, 1.0, /*add=*/false, /*by_id=*/true, gradient);
  });
  return cost;
}

}  // namespace

const LayerCost& ComputeCalibration::CostOf(const LayerShape& shape) {
  auto it = costs_.find(shape);
  if (it == costs_.end()) {
    at::NoGradGuard no_grad;
    it = costs_.emplace(shape, shape.table ? MeasureTable(shape) : Measure(shape)).first;
  }
  return it->second;
}

double ComputeCalibration::Contention() {
  if (contention_ >= 0) return contention_;
  NoteThreadsOfTorch();
  at::NoGradGuard no_grad;
  constexpr int64_t kRows = 128, kFeatures = 1024;
  const at::Tensor x = Ones(kRows, kFeatures, at::kFloat);
  const auto product = [&x] { x.t().mm(x); };
  const double alone = BestOfTwo(product);
  const double together = BestOfTwo([&] {
    std::thread other([&] {
      UseThreadsOfTorch();
      at::NoGradGuard guard;
      product();
    });
    product();
    other.join();
  });
  contention_ = std::clamp(together / alone - 1, 0.0, 1.0);
  return contention_;
}

double ComputeCalibration::Copy() {
  if (copy_ >= 0) return copy_;
  constexpr int64_t kElements = int64_t{1} << 23;  // more than caches hold
  const at::Tensor from = Ones(1, kElements, at::kFloat), to = at::empty_like(from);
  copy_ = BestOfTwo([&] { std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes()); }) /
          static_cast<double>(from.nbytes());
  return copy_;
}

}  // namespace poseidon
