#include "core/schemes/row_scales.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace poseidon {
namespace {

constexpr int kStep = 4;
constexpr int kTopExponent = 16;                // float16 ends just below 2^16
constexpr int kMostSteps = 31;                  // 2^-124 and 2^124: the inverse is a normal float32 too
constexpr float kRoundsUp = 0x1p0f - 0x1p-12f;  // fractions from here on round to 1 in the 11 bits of float16

constexpr int kBits = 6;
constexpr uint32_t kMask = (1u << kBits) - 1;
constexpr int kXShift = kFlagBits;
constexpr int kDShift = kXShift + kBits;
static_assert(kDShift + kBits == 16, "flags and both exponents fill the element");

unsigned char* Cell(void* row, const FactorLayout& layout) {
  return static_cast<unsigned char*>(row) + layout.flag_offset() * SizeOf(DType::kFloat16);
}

uint32_t Encode(int exponent) { return static_cast<uint32_t>(exponent / kStep) & kMask; }

int Decode(uint32_t bits) {
  const int steps = static_cast<int>(bits & kMask);
  return kStep * (steps > kMostSteps ? steps - (1 << kBits) : steps);
}

}  // namespace

int ScaleExponent(float largest) {
  if (largest == 0 || !std::isfinite(largest)) return 0;
  int exponent = 0;
  if (std::frexp(largest, &exponent) >= kRoundsUp) ++exponent;
  const int steps = static_cast<int>(std::ceil(static_cast<float>(exponent - kTopExponent) / kStep));
  return kStep * std::clamp(steps, -kMostSteps, kMostSteps);
}

void WriteRowScales(void* row, const RowScales& scales, const FactorLayout& layout) {
  const auto cell = static_cast<uint16_t>(Encode(scales.x) << kXShift | Encode(scales.d) << kDShift);
  std::memcpy(Cell(row, layout), &cell, sizeof(cell));
}

RowScales ReadRowScales(const void* row, const FactorLayout& layout) {
  uint16_t cell;
  std::memcpy(&cell, Cell(const_cast<void*>(row), layout), sizeof(cell));
  return {Decode(uint32_t{cell} >> kXShift), Decode(uint32_t{cell} >> kDShift)};
}

}  // namespace poseidon
