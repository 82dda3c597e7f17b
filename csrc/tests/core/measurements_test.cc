#include "core/model/measurements.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/base/bounds.h"
#include "tests/check.h"

namespace poseidon {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(DurationsRoundTrip) {
  std::vector<double> back = {7};
  POSEIDON_REQUIRE_OK(DecodeDurations(EncodeDurations({0.5, 0, 3}), 3, &back));
  POSEIDON_CHECK_EQ(back, std::vector<double>{0.5, 0, 3});
  POSEIDON_REQUIRE_OK(
      DecodeDurations(EncodeDurations({std::nan(""), kInfinity, -1}), 3, &back));  // a clock that jumped
  POSEIDON_CHECK_EQ(back, std::vector<double>{0, kMostSeconds, 0});
  POSEIDON_REQUIRE_OK(DecodeDurations({}, 0, &back));
  POSEIDON_CHECK(back.empty());
}

TEST(OtherNumbersOfDurationsFail) {
  std::vector<double> back;
  const std::vector<uint8_t> two = EncodeDurations({1, 2});
  for (size_t count : {size_t{0}, size_t{1}, size_t{3}, std::numeric_limits<size_t>::max()}) {
    POSEIDON_CHECK_EQ(DecodeDurations(two, count, &back).code(), StatusCode::kInvalidArgument);
  }
  POSEIDON_CHECK_CONTAINS(DecodeDurations(two, 3, &back).message(), "durations of 16 bytes");
}

TEST(DurationsThatAreNoneFail) {
  std::vector<double> back;
  for (double bad : {std::nan(""), kInfinity, -kInfinity, 1e308, -1.0, 2 * kMostSeconds}) {
    std::vector<uint8_t> bytes(8);
    std::memcpy(bytes.data(), &bad, 8);
    POSEIDON_CHECK(!DecodeDurations(bytes, 1, &back).ok());
  }
}

ComputeCosts Costs(double scale) {
  return {0.25 * scale, 1e-9 * scale, {{1 * scale, 2 * scale, 3 * scale, 4 * scale}, {}}};
}

TEST(CostsRoundTrip) {
  ComputeCosts back;
  POSEIDON_REQUIRE_OK(DecodeCosts(EncodeCosts(Costs(1)), 2, &back));
  POSEIDON_CHECK(back.contention == 0.25 && back.copy == 1e-9 && back.layers.size() == 2);
  POSEIDON_CHECK(back.layers[0].local == 1 && back.layers[0].input == 2 && back.layers[0].pack == 3 &&
                 back.layers[0].rebuild == 4);
  POSEIDON_CHECK_EQ(back.layers[1].rebuild, 0.0);
  POSEIDON_REQUIRE_OK(DecodeCosts(EncodeCosts({std::nan(""), kInfinity, {{-1, kInfinity, 1e308, 1}}}), 1, &back));
  POSEIDON_CHECK(back.contention == 0 && back.copy == kMostBeta && back.layers[0].local == 0 &&
                 back.layers[0].pack == kMostSeconds);
}

TEST(DamagedCostsFail) {
  ComputeCosts back;
  const std::vector<uint8_t> bytes = EncodeCosts(Costs(1));
  for (size_t layers : {size_t{0}, size_t{1}, size_t{3}, std::numeric_limits<size_t>::max()}) {
    POSEIDON_CHECK_EQ(DecodeCosts(bytes, layers, &back).code(), StatusCode::kInvalidArgument);
  }
  for (size_t at = 0; at < bytes.size(); at += 8) {
    for (double bad : {std::nan(""), kInfinity, -1.0, 1e308}) {
      std::vector<uint8_t> damaged = bytes;
      std::memcpy(damaged.data() + at, &bad, 8);
      POSEIDON_CHECK(!DecodeCosts(damaged, 2, &back).ok());
    }
  }
}

TEST(TheMedianOfRanksCounts) {
  const ComputeCosts median = MedianCosts({Costs(1), Costs(100), Costs(2)});
  POSEIDON_CHECK(median.contention == 0.5 && median.copy == 2e-9 && median.layers.size() == 2);
  POSEIDON_CHECK(median.layers[0].local == 2 && median.layers[0].rebuild == 8 && median.layers[1].local == 0);
}

}  // namespace
}  // namespace poseidon
