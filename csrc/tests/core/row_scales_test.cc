#include "core/schemes/row_scales.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/check.h"

namespace poseidon {
namespace {

constexpr FactorLayout kLayout{3, 2};
constexpr uint32_t kFlags = kFlagExtraWeight | kFlagExtraBias;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<uint16_t> Rows(int64_t rows, uint16_t fill) {
  return std::vector<uint16_t>(static_cast<size_t>(rows * kLayout.row_elements()), fill);
}

TEST(LargestMagnitudeIsAtTheTopOfFloat16) {
  for (int power = -112; power < 128; ++power) {
    for (float fraction : {1.0f, 1.3f, 1.999f}) {
      const float largest = std::ldexp(fraction, power);
      const int exponent = ScaleExponent(largest);
      POSEIDON_CHECK_EQ(exponent % 4, 0);
      const double sent = std::ldexp(static_cast<double>(largest), -exponent);
      POSEIDON_CHECK(sent >= 0x1p12 && sent <= 65504);
      POSEIDON_CHECK(std::isnormal(std::ldexp(1.0f, -exponent)) && std::isnormal(std::ldexp(1.0f, exponent)));
    }
  }
}

// 65520 and more would become infinity.
TEST(WhatRoundsUpStaysFinite) {
  for (int power : {-60, -4, 0, 4, 60}) {
    POSEIDON_CHECK_EQ(ScaleExponent(std::ldexp(65504.0f, power)), power);
    POSEIDON_CHECK_EQ(ScaleExponent(std::ldexp(std::nextafter(65520.0f, 0.0f), power)), power);
    POSEIDON_CHECK_EQ(ScaleExponent(std::ldexp(65520.0f, power)), power + 4);
    POSEIDON_CHECK_EQ(ScaleExponent(std::ldexp(4094.0f, power)), power - 4);
    POSEIDON_CHECK_EQ(ScaleExponent(std::ldexp(4095.0f, power)), power);
  }
}

TEST(NothingToScale) {
  for (float value : {0.0f, kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    POSEIDON_CHECK_EQ(ScaleExponent(value), 0);
  }
}

TEST(EndsOfFloat32) {
  POSEIDON_CHECK_EQ(ScaleExponent(std::numeric_limits<float>::max()), 116);
  POSEIDON_CHECK_EQ(ScaleExponent(std::numeric_limits<float>::denorm_min()), -124);
}

TEST(EveryExponentBesideFlags) {
  for (int x = -124; x <= 124; x += 4) {
    for (int d = -124; d <= 124; d += 4) {
      std::vector<uint16_t> message = Rows(2, 0xffff);
      for (int row = 0; row < 2; ++row) WriteRowScales(&message[row * kLayout.row_elements()], {x, d}, kLayout);
      POSEIDON_CHECK_EQ(ReadFlags(message.data(), 2, kLayout, DType::kFloat16), 0u);
      WriteFlag(message.data(), 2, kFlags, kLayout, DType::kFloat16);
      POSEIDON_CHECK_EQ(ReadFlags(message.data(), 2, kLayout, DType::kFloat16), kFlags);
      for (int row = 0; row < 2; ++row) {
        const RowScales scales = ReadRowScales(&message[row * kLayout.row_elements()], kLayout);
        POSEIDON_CHECK_EQ(scales.x, x);
        POSEIDON_CHECK_EQ(scales.d, d);
      }
      for (size_t i = 0; i < message.size(); ++i) {  // x and d are untouched
        if (i % kLayout.row_elements() < 5) POSEIDON_CHECK_EQ(message[i], static_cast<uint16_t>(0xffff));
      }
    }
  }
}

// Of a rank that has flags and no rows.
TEST(RowOfZerosHasNoScales) {
  std::vector<uint16_t> message = Rows(1, 0);
  WriteFlag(message.data(), 1, kFlags, kLayout, DType::kFloat16);
  const RowScales scales = ReadRowScales(message.data(), kLayout);
  POSEIDON_CHECK_EQ(scales.x, 0);
  POSEIDON_CHECK_EQ(scales.d, 0);
}

TEST(UnalignedRows) {
  std::vector<unsigned char> bytes(2 * kLayout.row_elements() + 1);
  WriteRowScales(bytes.data() + 1, {-8, 124}, kLayout);
  const RowScales scales = ReadRowScales(bytes.data() + 1, kLayout);
  POSEIDON_CHECK_EQ(scales.x, -8);
  POSEIDON_CHECK_EQ(scales.d, 124);
}

TEST(OnlyFloat16HasScales) {
  POSEIDON_CHECK(HasRowScales(DType::kFloat16));
  for (DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    POSEIDON_CHECK(!HasRowScales(dtype));
    // Whatever stood there, the whole element is the flags.
    std::vector<unsigned char> message(static_cast<size_t>(kLayout.row_elements() * SizeOf(dtype)), 0xff);
    WriteFlag(message.data(), 1, kFlags, kLayout, dtype);
    const unsigned char* flag = message.data() + kLayout.flag_offset() * SizeOf(dtype);
    for (int64_t i = 0; i < SizeOf(dtype); ++i) {
      POSEIDON_CHECK_EQ(flag[i], static_cast<unsigned char>(i == 0 ? kFlags : 0));
    }
  }
}

}  // namespace
}  // namespace poseidon
