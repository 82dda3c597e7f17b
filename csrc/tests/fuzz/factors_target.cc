// Flags and ids in a gathered message: a layout, then the message at an odd address.
#include <unordered_map>

#include "core/base/bounds.h"
#include "core/schemes/factor_layout.h"
#include "core/schemes/id_slots.h"
#include "tests/fuzz/fuzz.h"

namespace poseidon {
namespace fuzz {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 2;

constexpr size_t kHeader = 3;  // dtype, x, d

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kUInt8}) {
    const FactorLayout layout{4, 2};
    Bytes seed = {static_cast<uint8_t>(dtype), 4, 2};
    seed.resize(kHeader + static_cast<size_t>(3 * layout.row_elements() * SizeOf(dtype)), 1);
    WriteFlag(seed.data() + kHeader, 3, kFlagExtraBias, layout, dtype);
    if (IsFloating(dtype)) WriteId(seed.data() + kHeader, 70000, dtype);
    seeds.push_back(seed);
  }
  return seeds;
}

uint64_t LittleEndian(const uint8_t* at, int64_t width) {
  uint64_t value = 0;
  for (int64_t i = 0; i < width; ++i) value |= uint64_t{at[i]} << (8 * i);
  return value;
}

void CheckIds(const uint8_t* message, int64_t rows, int64_t row_bytes, DType dtype) {
  IdSlots slots;
  std::unordered_map<uint32_t, size_t> known;
  for (int64_t row = 0; row < rows; ++row) {
    const uint32_t id = ReadId(message + row * row_bytes, dtype);
    FUZZ_REQUIRE(id == static_cast<uint32_t>(LittleEndian(message + row * row_bytes, 4)));
    const size_t slot = known.emplace(id, known.size()).first->second;
    FUZZ_REQUIRE(slots.SlotOf(id) == slot && slots.Find(id) == slot && slots.ids()[slot] == id);
  }
  FUZZ_REQUIRE(slots.size() == known.size());
}

void CheckCounts(Choices choices) {
  const auto count = [&] { return static_cast<int64_t>(choices.Word() % (static_cast<uint64_t>(kMostCount) + 1)); };
  const FactorLayout layout{count(), count()};
  const int64_t rows = count();
  const bool fits =
      static_cast<double>(rows) * static_cast<double>(layout.row_elements()) <= static_cast<double>(kMost);
  FUZZ_REQUIRE(CheckElementCount(rows, layout, kMost, "w").ok() == fits);
}

bool Run(const Bytes& input) {
  if (input.size() < kHeader || input[0] >= static_cast<uint8_t>(DType::kOther)) return false;
  const auto dtype = static_cast<DType>(input[0]);
  const FactorLayout layout{input[1], input[2]};
  const int64_t width = SizeOf(dtype);
  const int64_t row_bytes = layout.row_elements() * width;
  const int64_t rows = static_cast<int64_t>(input.size() - kHeader) / row_bytes;
  Bytes message(input.begin() + kHeader, input.begin() + static_cast<std::ptrdiff_t>(kHeader + rows * row_bytes));

  uint32_t flags = 0;
  for (int64_t row = 0; row < rows; ++row) {
    flags |=
        static_cast<uint32_t>(LittleEndian(message.data() + row * row_bytes + layout.flag_offset() * width, width));
  }
  flags &= (1u << kFlagBits) - 1;  // the rest of a cell is for scales
  FUZZ_REQUIRE(ReadFlags(input.data() + kHeader, rows, layout, dtype) == flags);
  if (layout.in_features * width >= 4) CheckIds(message.data(), rows, row_bytes, dtype);
  CheckCounts(Choices(input, kHeader));

  const uint32_t written = input[1] & (kFlagExtraWeight | kFlagExtraBias);
  if (rows > 0) {
    const Bytes before = message;
    WriteFlag(message.data(), rows, written, layout, dtype);
    FUZZ_REQUIRE(ReadFlags(message.data(), rows, layout, dtype) == written);
    for (int64_t i = 0; i < rows * row_bytes; ++i) {
      if (i % row_bytes < layout.flag_offset() * width) FUZZ_REQUIRE(message[i] == before[i]);
    }
  }
  return true;
}

}  // namespace

const Target kFactorsTarget = {
    "factors", "flags and ids are the bytes at their places, whatever the alignment, and nothing else is touched",
    Seeds, Run};

}  // namespace fuzz
}  // namespace poseidon
