// Durations and costs of one rank: how many there should be, then the bytes.
#include <algorithm>

#include "core/base/bounds.h"
#include "core/model/alpha_beta.h"
#include "core/model/measurements.h"
#include "tests/fuzz/fuzz.h"

namespace poseidon {
namespace fuzz {
namespace {

Bytes Counted(uint8_t count, const Bytes& bytes) {
  Bytes input(1 + bytes.size(), count);
  std::copy(bytes.begin(), bytes.end(), input.begin() + 1);
  return input;
}

std::vector<Bytes> Seeds() {
  return {Counted(0, {}), Counted(3, EncodeDurations({1e-3, 2e-3, 0})), Counted(0, EncodeCosts({})),
          Counted(2, EncodeCosts({0.5, 1e-10, {{1e-3, 2e-3, 1e-4, 4e-3}, {}}}))};
}

bool RunDurations(const Bytes& bytes, size_t count) {
  std::vector<double> seconds;
  const uint64_t before = AllocatedBytes();
  const bool read = DecodeDurations(bytes, count, &seconds).ok();
  FUZZ_REQUIRE(AllocatedBytes() - before <= MostAllocated(bytes.size()));
  if (!read) return false;
  FUZZ_REQUIRE(seconds.size() == count && EncodeDurations(seconds) == bytes);
  std::vector<Trial> trials;
  for (size_t i = 0; i < count; ++i) {
    trials.push_back({4096.0 * static_cast<double>(1 + i % 3), {seconds[i], seconds[count - 1 - i]}});
  }
  const AlphaBetaFit fit = FitAlphaBeta(trials);
  FUZZ_REQUIRE(IsWithin(fit.model.alpha, 0, kMostAlpha) && IsWithin(fit.model.beta, 0, kMostBeta));
  FUZZ_REQUIRE(IsWithin(fit.skew_seconds, 0, kMostSeconds));
  FUZZ_REQUIRE(fit.model.known() == (count > 0));
  return true;
}

bool RunCosts(const Bytes& bytes, size_t count) {
  ComputeCosts costs;
  const uint64_t before = AllocatedBytes();
  const bool read = DecodeCosts(bytes, count, &costs).ok();
  FUZZ_REQUIRE(AllocatedBytes() - before <= MostAllocated(bytes.size()));
  if (!read) return false;
  FUZZ_REQUIRE(costs.layers.size() == count && EncodeCosts(costs) == bytes);
  FUZZ_REQUIRE(IsWithin(costs.contention, 0, 1) && IsWithin(costs.copy, 0, kMostBeta));
  FUZZ_REQUIRE(EncodeCosts(MedianCosts({costs, costs, costs})) == bytes);
  return true;
}

bool Run(const Bytes& input) {
  if (input.empty()) return false;
  const Bytes bytes(input.begin() + 1, input.end());
  const bool durations = RunDurations(bytes, input[0]);
  return RunCosts(bytes, input[0]) || durations;
}

}  // namespace

const Target kMeasurementsTarget = {
    "measurements", "what decodes encodes to the same bytes and gives a network and costs within bounds", Seeds, Run};

}  // namespace fuzz
}  // namespace poseidon
