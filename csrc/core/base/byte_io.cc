#include "core/base/byte_io.h"

#include <cmath>
#include <cstring>

namespace poseidon {

static_assert(sizeof(double) == sizeof(uint64_t), "doubles travel as 64 bits");

void ByteWriter::WriteU32(uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) WriteU8(static_cast<uint8_t>(value >> shift));
}

void ByteWriter::WriteU64(uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) WriteU8(static_cast<uint8_t>(value >> shift));
}

void ByteWriter::WriteDouble(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  WriteU64(bits);
}

void ByteWriter::WriteString(const std::string& value) {
  WriteU32(static_cast<uint32_t>(value.size()));
  bytes_.insert(bytes_.end(), value.begin(), value.end());
}

void ByteWriter::WriteI64Vector(const std::vector<int64_t>& values) {
  WriteU32(static_cast<uint32_t>(values.size()));
  for (int64_t value : values) WriteI64(value);
}

bool ByteReader::Have(size_t count) {
  if (count > remaining()) Fail();
  return ok_;
}

uint8_t ByteReader::ReadU8() { return Have(1) ? data_[position_++] : 0; }

bool ByteReader::ReadBool() {
  const uint8_t value = ReadU8();
  if (value > 1) Fail();
  return ok_ && value == 1;
}

uint32_t ByteReader::ReadU32() {
  if (!Have(4)) return 0;
  uint32_t value = 0;
  for (int shift = 0; shift < 32; shift += 8) value |= static_cast<uint32_t>(data_[position_++]) << shift;
  return value;
}

uint64_t ByteReader::ReadU64() {
  if (!Have(8)) return 0;
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 8) value |= static_cast<uint64_t>(data_[position_++]) << shift;
  return value;
}

double ByteReader::ReadDouble() {
  const uint64_t bits = ReadU64();
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  if (!std::isfinite(value)) Fail();
  return ok_ ? value : 0;
}

double ByteReader::ReadDoubleWithin(double least, double most) {
  const double value = ReadDouble();
  if (!IsWithin(value, least, most)) Fail();
  return ok_ ? value : 0;
}

double ByteReader::ReadOrNone(double most) {
  const double value = ReadDouble();
  if (value != -1 && !IsWithin(value, 0, most)) Fail();
  return ok_ ? value : 0;
}

std::string ByteReader::ReadString() {
  const uint32_t size = ReadCount(1);
  if (size == 0) return {};
  std::string value(reinterpret_cast<const char*>(data_ + position_), size);
  position_ += size;
  return value;
}

std::vector<int64_t> ByteReader::ReadI64Vector() {
  std::vector<int64_t> values(ReadCount(8));
  for (int64_t& value : values) value = ReadI64();
  return values;
}

uint32_t ByteReader::ReadCount(size_t min_record_bytes) {
  const uint32_t count = ReadU32();
  if (count > remaining() / min_record_bytes) Fail();
  return ok_ ? count : 0;
}

}  // namespace poseidon
