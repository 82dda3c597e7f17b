#include "core/base/byte_io.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/base/dtype.h"
#include "tests/check.h"

namespace poseidon {
namespace {

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

std::vector<uint8_t> WriteAll() {
  ByteWriter writer;
  writer.WriteU8(200);
  writer.WriteBool(true);
  writer.WriteU32(0x01020304);
  writer.WriteU64(0x0102030405060708);
  writer.WriteI64(kMin);
  writer.WriteDouble(-0.1);
  writer.WriteString(std::string("a\0b", 3));
  writer.WriteI64Vector({1, -1});
  return writer.Take();
}

bool ReadAll(ByteReader* reader) {
  const bool same = reader->ReadU8() == 200 && reader->ReadBool() && reader->ReadU32() == 0x01020304 &&
                    reader->ReadU64() == 0x0102030405060708 && reader->ReadI64() == kMin &&
                    reader->ReadDouble() == -0.1 && reader->ReadString() == std::string("a\0b", 3) &&
                    reader->ReadI64Vector() == std::vector<int64_t>{1, -1};
  return same && reader->Finished();
}

TEST(RoundTrip) {
  const std::vector<uint8_t> bytes = WriteAll();
  ByteReader reader(bytes);
  POSEIDON_CHECK(ReadAll(&reader));
}

TEST(LittleEndian) {
  ByteWriter writer;
  writer.WriteU32(0x01020304);
  writer.WriteU64(1);
  POSEIDON_CHECK_EQ(writer.bytes(), std::vector<uint8_t>{4, 3, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0});
}

TEST(EveryTruncationFails) {
  const std::vector<uint8_t> bytes = WriteAll();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    ByteReader reader(cut);
    POSEIDON_CHECK(!ReadAll(&reader));
  }
}

TEST(TrailingBytesAreNotFinished) {
  std::vector<uint8_t> bytes = WriteAll();
  bytes.push_back(0);
  ByteReader reader(bytes);
  POSEIDON_CHECK(!ReadAll(&reader));
  POSEIDON_CHECK(reader.ok());
  POSEIDON_CHECK_EQ(reader.remaining(), size_t{1});
}

TEST(HugeCountsDoNotAllocate) {
  const std::vector<uint8_t> bytes(8, 0xff);
  ByteReader strings(bytes);
  POSEIDON_CHECK_EQ(strings.ReadString(), "");
  POSEIDON_CHECK(!strings.ok());
  ByteReader vectors(bytes);
  POSEIDON_CHECK_EQ(vectors.ReadI64Vector(), std::vector<int64_t>{});
  POSEIDON_CHECK(!vectors.ok());
  const std::vector<uint8_t> two = {2, 0, 0, 0, 0, 0, 0, 0, 0};
  ByteReader fits(two);
  POSEIDON_CHECK_EQ(fits.ReadCount(2), 2u);
  ByteReader does_not_fit(two);
  POSEIDON_CHECK_EQ(does_not_fit.ReadCount(3), 0u);
  POSEIDON_CHECK(!does_not_fit.ok());
}

TEST(FailureIsStickyAndReadsZero) {
  const std::vector<uint8_t> bytes = {2, 7};
  ByteReader reader(bytes);
  POSEIDON_CHECK(!reader.ReadBool());  // 2 is no bool
  POSEIDON_CHECK(!reader.ok());
  POSEIDON_CHECK_EQ(reader.ReadU8(), uint8_t{0});
  POSEIDON_CHECK(!reader.Finished());
}

TEST(EnumRange) {
  const std::vector<uint8_t> bytes = {static_cast<uint8_t>(DType::kOther), static_cast<uint8_t>(DType::kOther) + 1};
  ByteReader reader(bytes);
  POSEIDON_CHECK_EQ(reader.ReadEnum(DType::kOther), DType::kOther);
  POSEIDON_CHECK(reader.ok());
  POSEIDON_CHECK_EQ(reader.ReadEnum(DType::kOther), DType::kUInt8);
  POSEIDON_CHECK(!reader.ok());
}

TEST(EmptyInput) {
  ByteReader reader(nullptr, 0);
  POSEIDON_CHECK(reader.Finished());
  POSEIDON_CHECK_EQ(reader.ReadU64(), uint64_t{0});
  POSEIDON_CHECK(!reader.ok());
}

TEST(OnlyNumbersWithinBoundsAreRead) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  ByteWriter writer;
  for (double value : {std::nan(""), kInfinity, -kInfinity, 1e308, -1e-300, 1e10, -2.0}) writer.WriteDouble(value);
  const std::vector<uint8_t> bytes = writer.Take();
  for (size_t at = 0; at < bytes.size(); at += 8) {
    ByteReader seconds(bytes.data() + at, 8), or_none(bytes.data() + at, 8);
    POSEIDON_CHECK_EQ(seconds.ReadSeconds(), 0.0);
    POSEIDON_CHECK(!seconds.ok());
    POSEIDON_CHECK_EQ(or_none.ReadOrNone(kMostSeconds), 0.0);
    POSEIDON_CHECK(!or_none.ok());
    ByteReader finite(bytes.data() + at, 8);
    finite.ReadDouble();
    POSEIDON_CHECK_EQ(finite.ok(), at >= 3 * 8);
  }
}

TEST(WhatIsWrittenWithinBoundsIsRead) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<double> given = {std::nan(""), kInfinity, -kInfinity, 1e308, -0.0, 5e-324, 0.25, -3};
  const std::vector<double> seconds = {0, 1e9, 0, 1e9, 0, 5e-324, 0.25, 0};
  const std::vector<double> or_none = {0, 1e9, -1, 1e9, 0, 5e-324, 0.25, -1};
  for (size_t i = 0; i < given.size(); ++i) {
    ByteWriter writer;
    writer.WriteSeconds(given[i]);
    writer.WriteOrNone(given[i], kMostSeconds);
    writer.WriteDoubleWithin(given[i], -2, 2);
    ByteReader reader(writer.bytes());
    POSEIDON_CHECK_EQ(reader.ReadSeconds(), seconds[i]);
    POSEIDON_CHECK_EQ(reader.ReadOrNone(kMostSeconds), or_none[i]);
    POSEIDON_CHECK(std::fabs(reader.ReadDoubleWithin(-2, 2)) <= 2);
    POSEIDON_CHECK(reader.Finished());
  }
}

}  // namespace
}  // namespace poseidon
