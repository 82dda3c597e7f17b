// Little-endian encoding of what ranks tell each other. Readers are fed by other processes, so every read is
// bounds-checked: a truncated or corrupt input ends in ok() == false, never in undefined behaviour or a huge
// allocation. Neither class is thread-safe.
#ifndef POSEIDON_CORE_BYTE_IO_H_
#define POSEIDON_CORE_BYTE_IO_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/base/bounds.h"

namespace poseidon {

class ByteWriter {
 public:
  void WriteU8(uint8_t value) { bytes_.push_back(value); }
  void WriteBool(bool value) { WriteU8(value ? 1 : 0); }
  void WriteU32(uint32_t value);
  void WriteU64(uint64_t value);
  void WriteI64(int64_t value) { WriteU64(static_cast<uint64_t>(value)); }
  void WriteDouble(double value);  // IEEE 754 bits
  // Moved into the bounds that the reader has (bounds.h), so that what one rank measures every rank can read.
  void WriteDoubleWithin(double value, double least, double most) { WriteDouble(Bounded(value, least, most)); }
  void WriteSeconds(double value) { WriteDoubleWithin(value, 0, kMostSeconds); }
  void WriteOrNone(double value, double most) { value < 0 ? WriteDouble(-1) : WriteDoubleWithin(value, 0, most); }
  void WriteString(const std::string& value);               // U32 length, bytes
  void WriteI64Vector(const std::vector<int64_t>& values);  // U32 count, elements

  const std::vector<uint8_t>& bytes() const { return bytes_; }
  std::vector<uint8_t> Take() { return std::move(bytes_); }

 private:
  std::vector<uint8_t> bytes_;
};

// Does not own the bytes, which must outlive it. The first failure is sticky: every later read returns a zero value, so
// a decoder may read a whole record and look at ok() once.
class ByteReader {
 public:
  ByteReader(const void* data, size_t size) : data_(static_cast<const uint8_t*>(data)), size_(size) {}
  explicit ByteReader(const std::vector<uint8_t>& bytes) : ByteReader(bytes.data(), bytes.size()) {}

  uint8_t ReadU8();
  bool ReadBool();  // a byte other than 0 and 1 fails
  uint32_t ReadU32();
  uint64_t ReadU64();
  int64_t ReadI64() { return static_cast<int64_t>(ReadU64()); }
  double ReadDouble();                                 // one that is not finite fails
  double ReadDoubleWithin(double least, double most);  // one outside fails
  double ReadSeconds() { return ReadDoubleWithin(0, kMostSeconds); }
  double ReadOrNone(double most);  // 0 to `most`, or -1
  std::string ReadString();
  std::vector<int64_t> ReadI64Vector();
  // Count of records that follow, each at least min_record_bytes (>= 1) long. Fails if so many cannot be left, which
  // keeps a corrupt count from becoming an allocation.
  uint32_t ReadCount(size_t min_record_bytes);
  // Byte of an enum whose last enumerator is `last`; a larger value fails.
  template <typename Enum>
  Enum ReadEnum(Enum last) {
    const uint8_t value = ReadU8();
    if (value > static_cast<uint8_t>(last)) Fail();
    return static_cast<Enum>(ok_ ? value : 0);
  }

  // For a decoder that finds a value out of its range.
  void Fail() { ok_ = false; }
  bool ok() const { return ok_; }
  size_t remaining() const { return size_ - position_; }
  // True when all was read and nothing failed: call it last, or trailing rubbish passes unseen.
  bool Finished() const { return ok_ && remaining() == 0; }

 private:
  bool Have(size_t count);

  const uint8_t* data_;
  size_t size_;
  size_t position_ = 0;
  bool ok_ = true;
};

}  // namespace poseidon

#endif  // POSEIDON_CORE_BYTE_IO_H_
