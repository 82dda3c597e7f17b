#include "core/schemes/factor_layout.h"

#include <algorithm>

#include "tests/check.h"

namespace poseidon {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 2;

constexpr FactorLayout kLayout{3, 2};
constexpr uint32_t kBoth = kFlagExtraWeight | kFlagExtraBias;
// One dtype per element width and every one that factors have.
const std::vector<DType> kDTypes = {DType::kUInt8,   DType::kFloat16, DType::kBFloat16,
                                    DType::kFloat32, DType::kFloat64, DType::kInt64};

// Bytes of `rows` rows, each 0xff so that whatever WriteFlag misses shows up.
std::vector<unsigned char> Rows(int64_t rows, DType dtype) {
  return std::vector<unsigned char>(static_cast<size_t>(rows * kLayout.row_elements() * SizeOf(dtype)), 0xff);
}

TEST(Offsets) {
  POSEIDON_CHECK_EQ(kLayout.row_elements(), 6);
  POSEIDON_CHECK_EQ(kLayout.x_offset(), 0);
  POSEIDON_CHECK_EQ(kLayout.d_offset(), 3);
  POSEIDON_CHECK_EQ(kLayout.flag_offset(), 5);
}

TEST(RowsOfAMessage) {
  POSEIDON_CHECK_EQ(MessageRows(0, 0), 0);
  POSEIDON_CHECK_EQ(MessageRows(0, kFlagExtraBias), 1);
  POSEIDON_CHECK_EQ(MessageRows(7, 0), 7);
  POSEIDON_CHECK_EQ(MessageRows(7, kBoth), 7);
}

TEST(FlagsOfEveryWidth) {
  for (DType dtype : kDTypes) {
    for (uint32_t flags : {0u, kFlagExtraWeight, kFlagExtraBias, kBoth}) {
      std::vector<unsigned char> message = Rows(4, dtype);
      WriteFlag(message.data(), 4, flags, kLayout, dtype);
      POSEIDON_CHECK_EQ(ReadFlags(message.data(), 4, kLayout, dtype), flags);
      // Only the first row carries them, and x and d are untouched.
      const size_t row_bytes = message.size() / 4, width = static_cast<size_t>(SizeOf(dtype));
      POSEIDON_CHECK_EQ(ReadFlags(message.data() + row_bytes, 3, kLayout, dtype), 0u);
      for (size_t i = 0; i < message.size(); ++i) {
        if (i % row_bytes < row_bytes - width) POSEIDON_CHECK_EQ(message[i], static_cast<unsigned char>(0xff));
      }
    }
  }
}

TEST(GatheredFlagsAreOred) {
  for (DType dtype : kDTypes) {
    std::vector<unsigned char> gathered;
    const std::vector<std::pair<int64_t, uint32_t>> ranks = {
        {3, 0}, {0, 0}, {2, kFlagExtraBias}, {1, kFlagExtraWeight}};
    for (const auto& [rows, flags] : ranks) {
      std::vector<unsigned char> message = Rows(rows, dtype);
      WriteFlag(message.data(), rows, flags, kLayout, dtype);
      gathered.insert(gathered.end(), message.begin(), message.end());
    }
    POSEIDON_CHECK_EQ(ReadFlags(gathered.data(), 6, kLayout, dtype), kBoth);
    POSEIDON_CHECK_EQ(ReadFlags(gathered.data(), 5, kLayout, dtype), kFlagExtraBias);
    POSEIDON_CHECK_EQ(ReadFlags(gathered.data(), 3, kLayout, dtype), 0u);
  }
}

TEST(ZeroRows) {
  WriteFlag(nullptr, 0, kBoth, kLayout, DType::kFloat32);
  POSEIDON_CHECK_EQ(ReadFlags(nullptr, 0, kLayout, DType::kFloat32), 0u);
  // A rank with a flag only: one row, zero but for the flag.
  std::vector<float> row(6, 0.0f);
  WriteFlag(row.data(), MessageRows(0, kBoth), kBoth, kLayout, DType::kFloat32);
  POSEIDON_CHECK_EQ(ReadFlags(row.data(), 1, kLayout, DType::kFloat32), kBoth);
  POSEIDON_CHECK(std::all_of(row.begin(), row.begin() + 5, [](float value) { return value == 0.0f; }));
}

TEST(UnalignedMessages) {
  for (DType dtype : kDTypes) {
    std::vector<unsigned char> bytes = Rows(3, dtype);
    bytes.push_back(0);
    WriteFlag(bytes.data() + 1, 3, kBoth, kLayout, dtype);
    POSEIDON_CHECK_EQ(ReadFlags(bytes.data() + 1, 3, kLayout, dtype), kBoth);
  }
}

TEST(FlagColumnAlone) {
  const std::vector<uint16_t> column = {0, 0, 2, 0, 1};
  POSEIDON_CHECK_EQ(ReadFlags(column.data(), 5, FactorLayout{0, 0}, DType::kBFloat16), kBoth);
}

TEST(IdsKeepTheirBits) {
  POSEIDON_CHECK_EQ(IdElements(DType::kFloat16), 2);
  POSEIDON_CHECK_EQ(IdElements(DType::kBFloat16), 2);
  POSEIDON_CHECK_EQ(IdElements(DType::kFloat32), 1);
  POSEIDON_CHECK_EQ(IdElements(DType::kFloat64), 1);
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    const FactorLayout layout{IdElements(dtype), 3};
    const int64_t width = SizeOf(dtype);
    POSEIDON_CHECK_EQ(layout.d_offset() * width, dtype == DType::kFloat64 ? 8 : 4);
    // As floats these are a denormal, a NaN and -0: arithmetic could change each of them.
    for (uint32_t id : {0u, 1u, 0x7fc00001u, 0x80000000u, 0xffffffffu}) {
      std::vector<unsigned char> message(static_cast<size_t>(2 * layout.row_elements() * width), 0xff);
      unsigned char* second = message.data() + layout.row_elements() * width;
      WriteId(second, id, dtype);
      WriteFlag(message.data(), 2, kFlagExtraWeight, layout, dtype);
      POSEIDON_CHECK_EQ(ReadId(second, dtype), id);
      POSEIDON_CHECK_EQ(ReadFlags(message.data(), 2, layout, dtype), kFlagExtraWeight);
      for (int64_t i = layout.d_offset() * width; i < layout.flag_offset() * width; ++i) {
        POSEIDON_CHECK_EQ(second[i], static_cast<unsigned char>(0xff));  // d is untouched
      }
    }
  }
}

TEST(ElementLimit) {
  constexpr int64_t kLimit = (int64_t{1} << 31) - 1;  // must stay under it
  const FactorLayout one{0, 0};
  POSEIDON_CHECK_OK(CheckElementCount(0, kLayout, kMost, "w"));
  POSEIDON_CHECK_OK(CheckElementCount(kLimit - 1, one, kMost, "w"));
  POSEIDON_CHECK(!CheckElementCount(kLimit, one, kMost, "w").ok());
  const FactorLayout vgg{4096, 4096};
  POSEIDON_CHECK_OK(CheckElementCount(262112, vgg, kMost, "w"));
  const Status status = CheckElementCount(262113, vgg, kMost, "fc7.weight");
  POSEIDON_CHECK_EQ(status.code(), StatusCode::kInvalidArgument);
  POSEIDON_CHECK_CONTAINS(status.message(), "fc7.weight: the factors of 262113 rows");
  POSEIDON_CHECK_CONTAINS(status.message(), "262112 such rows");
  POSEIDON_CHECK(!CheckElementCount(int64_t{1} << 62, vgg, kMost, "w").ok());  // the product would overflow
}

}  // namespace
}  // namespace poseidon
