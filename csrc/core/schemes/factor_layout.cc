#include "core/schemes/factor_layout.h"

#include <cstring>

#include "core/schemes/row_scales.h"

namespace poseidon {
namespace {

constexpr uint32_t kFlagMask = (1u << kFlagBits) - 1;

// One flag element through memcpy: the message may be unaligned, and its type is not ours to alias.
template <typename Word>
void StoreFlag(unsigned char* at, uint32_t flags) {
  const Word word = static_cast<Word>(flags);
  std::memcpy(at, &word, sizeof(word));
}

template <typename Word>
uint32_t LoadFlag(const unsigned char* at) {
  Word word;
  std::memcpy(&word, at, sizeof(word));
  return static_cast<uint32_t>(word);
}

void Store(unsigned char* at, uint32_t flags, int64_t width) {
  switch (width) {
    case 1:
      return StoreFlag<uint8_t>(at, flags);
    case 2:
      return StoreFlag<uint16_t>(at, flags);
    case 4:
      return StoreFlag<uint32_t>(at, flags);
    case 8:
      return StoreFlag<uint64_t>(at, flags);
  }
}

uint32_t Load(const unsigned char* at, int64_t width) {
  switch (width) {
    case 1:
      return LoadFlag<uint8_t>(at);
    case 2:
      return LoadFlag<uint16_t>(at);
    case 4:
      return LoadFlag<uint32_t>(at);
    case 8:
      return LoadFlag<uint64_t>(at);
  }
  return 0;
}

}  // namespace

int64_t MessageRows(int64_t rows, uint32_t flags) { return rows == 0 && flags != 0 ? 1 : rows; }

void WriteFlag(void* message, int64_t rows, uint32_t flags, const FactorLayout& layout, DType dtype) {
  const int64_t width = SizeOf(dtype);
  auto* bytes = static_cast<unsigned char*>(message);
  for (int64_t row = 0; row < rows; ++row) {
    unsigned char* at = bytes + (row * layout.row_elements() + layout.flag_offset()) * width;
    const uint32_t scales = HasRowScales(dtype) ? Load(at, width) & ~kFlagMask : 0;
    Store(at, scales | (row == 0 ? flags : 0), width);
  }
}

uint32_t ReadFlags(const void* gathered, int64_t total_rows, const FactorLayout& layout, DType dtype) {
  const int64_t width = SizeOf(dtype);
  const auto* bytes = static_cast<const unsigned char*>(gathered);
  uint32_t flags = 0;
  for (int64_t row = 0; row < total_rows; ++row) {
    flags |= Load(bytes + (row * layout.row_elements() + layout.flag_offset()) * width, width);
  }
  return flags & kFlagMask;
}

int64_t IdElements(DType dtype) { return SizeOf(dtype) == 2 ? 2 : 1; }

void WriteId(void* row, uint32_t id, DType dtype) {
  if (SizeOf(dtype) == 8) {
    const uint64_t wide = id;  // its upper half is 0
    std::memcpy(row, &wide, sizeof(wide));
  } else {
    std::memcpy(row, &id, sizeof(id));
  }
}

uint32_t ReadId(const void* row, DType dtype) {
  return SizeOf(dtype) == 8 ? static_cast<uint32_t>(LoadFlag<uint64_t>(static_cast<const unsigned char*>(row)))
                            : LoadFlag<uint32_t>(static_cast<const unsigned char*>(row));
}

Status CheckElementCount(int64_t total_rows, const FactorLayout& layout, int64_t max_elements,
                         const std::string& name) {
  const int64_t max_rows = max_elements / layout.row_elements();  // by division: the product may overflow
  if (total_rows <= max_rows) return Status::OK();
  return Status::InvalidArgument(name + ": the factors of " + std::to_string(total_rows) + " rows (all ranks) of " +
                                 std::to_string(layout.row_elements()) +
                                 " elements exceed one collective, which holds " + std::to_string(max_rows) +
                                 " such rows; use scheme allreduce for this parameter");
}

}  // namespace poseidon
