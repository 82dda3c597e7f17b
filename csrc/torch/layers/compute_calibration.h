// What a layer's products cost on this machine, measured with the very functions that training runs. All ranks do it at
// the same time, so that ranks that share cores take each other's into account as they do in a step.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <tuple>

#include "core/model/step_model.h"

namespace poseidon {

struct LayerShape {
  bool table = false;  // an embedding of out_features rows of in_features elements
  int64_t out_features = 0;
  int64_t in_features = 0;
  int64_t rows = 0;         // of this rank; of a table: ids
  int64_t global_rows = 0;  // of all ranks; of a table: after merging on each
  int64_t ranks = 1;
  at::ScalarType gradient = at::kFloat;
  at::ScalarType wire = at::kFloat;  // of the factors

  bool operator<(const LayerShape& other) const { return Key() < other.Key(); }

 private:
  std::tuple<bool, int64_t, int64_t, int64_t, int64_t, int64_t, at::ScalarType, at::ScalarType> Key() const {
    return {table, out_features, in_features, rows, global_rows, ranks, gradient, wire};
  }
};

// Results are kept: layers of the same shape are measured once. Not thread-safe.
class ComputeCalibration {
 public:
  // Takes tens of milliseconds per new shape: large products are timed on a part of the output and scaled.
  const LayerCost& CostOf(const LayerShape& shape);
  // StepModel::contention: how much a product delays another one on a second thread, from 0 to 1.
  double Contention();
  // StepModel::copy: seconds per byte of a gradient that is copied.
  double Copy();

 private:
  std::map<LayerShape, LayerCost> costs_;
  double contention_ = -1;
  double copy_ = -1;
};

}  // namespace poseidon
