// What every rank measures for itself and tells the others: how long trial collectives took, and what the processor
// takes for its part. Encoding, and what counts of all ranks' numbers. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/status.h"
#include "core/model/work.h"

namespace poseidon {

std::vector<uint8_t> EncodeDurations(const std::vector<double>& seconds);
// kInvalidArgument for anything that EncodeDurations of `count` durations did not write; *out is then unspecified.
Status DecodeDurations(const std::vector<uint8_t>& bytes, size_t count, std::vector<double>* out);

struct ComputeCosts {
  double contention = 0;  // StepModel's, as is copy
  double copy = 0;
  std::vector<LayerCost> layers;  // one per parameter
};

std::vector<uint8_t> EncodeCosts(const ComputeCosts& costs);
// As DecodeDurations, of `layers` layers.
Status DecodeCosts(const std::vector<uint8_t>& bytes, size_t layers, ComputeCosts* out);
// Of each number the median over ranks, of which there is at least one, all with as many layers.
ComputeCosts MedianCosts(const std::vector<ComputeCosts>& by_rank);

}  // namespace poseidon
