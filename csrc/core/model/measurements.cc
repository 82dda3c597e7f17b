#include "core/model/measurements.h"

#include <string>

#include "core/base/bounds.h"
#include "core/base/byte_io.h"
#include "core/base/median.h"

namespace poseidon {

namespace {

constexpr double LayerCost::*kCosts[] = {&LayerCost::local, &LayerCost::input, &LayerCost::pack, &LayerCost::rebuild};

Status CannotRead(const char* what, size_t size) {
  return Status::InvalidArgument(std::string("cannot read a rank's ") + what + " of " + std::to_string(size) +
                                 " bytes; install the same version of poseidon_hvd on every rank");
}

template <typename Get>
double MedianOf(const std::vector<ComputeCosts>& by_rank, Get get) {
  std::vector<double> values;
  for (const ComputeCosts& costs : by_rank) values.push_back(get(costs));
  return Median(std::move(values));
}

}  // namespace

std::vector<uint8_t> EncodeDurations(const std::vector<double>& seconds) {
  ByteWriter writer;
  for (double value : seconds) writer.WriteSeconds(value);
  return writer.Take();
}

Status DecodeDurations(const std::vector<uint8_t>& bytes, size_t count, std::vector<double>* out) {
  out->clear();
  ByteReader reader(bytes);
  for (size_t i = 0; i < count && reader.ok(); ++i) out->push_back(reader.ReadSeconds());
  return reader.Finished() ? Status::OK() : CannotRead("durations", bytes.size());
}

std::vector<uint8_t> EncodeCosts(const ComputeCosts& costs) {
  ByteWriter writer;
  writer.WriteDoubleWithin(costs.contention, 0, 1);
  writer.WriteDoubleWithin(costs.copy, 0, kMostBeta);
  for (const LayerCost& cost : costs.layers) {
    for (double LayerCost::*field : kCosts) writer.WriteSeconds(cost.*field);
  }
  return writer.Take();
}

Status DecodeCosts(const std::vector<uint8_t>& bytes, size_t layers, ComputeCosts* out) {
  out->layers.clear();
  ByteReader reader(bytes);
  out->contention = reader.ReadDoubleWithin(0, 1);
  out->copy = reader.ReadDoubleWithin(0, kMostBeta);
  for (size_t i = 0; i < layers && reader.ok(); ++i) {
    LayerCost cost;
    for (double LayerCost::*field : kCosts) cost.*field = reader.ReadSeconds();
    out->layers.push_back(cost);
  }
  return reader.Finished() ? Status::OK() : CannotRead("measured costs", bytes.size());
}

ComputeCosts MedianCosts(const std::vector<ComputeCosts>& by_rank) {
  ComputeCosts median;
  median.contention = MedianOf(by_rank, [](const ComputeCosts& costs) { return costs.contention; });
  median.copy = MedianOf(by_rank, [](const ComputeCosts& costs) { return costs.copy; });
  median.layers.resize(by_rank.front().layers.size());
  for (size_t i = 0; i < median.layers.size(); ++i) {
    for (double LayerCost::*field : kCosts) {
      median.layers[i].*field = MedianOf(by_rank, [&](const ComputeCosts& costs) { return costs.layers[i].*field; });
    }
  }
  return median;
}

}  // namespace poseidon
