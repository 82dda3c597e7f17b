#include "tests/fuzz/mutator.h"

#include <algorithm>
#include <limits>

namespace poseidon {
namespace fuzz {
namespace {

template <typename T>
constexpr T kMost = std::numeric_limits<T>::max();

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kDoubles[] = {0,         -0.0,      1,          -1,     0.5,    2,      1e-9,    1e9,
                               1e18,      1e300,     1e308,      -1e308, 5e-324, 9.3e18, 1e9 + 1, 9007199254740993.0,
                               4.0000001, kInfinity, -kInfinity, kNaN,   -kNaN};
constexpr int64_t kIntegers[] = {0,
                                 1,
                                 -1,
                                 2,
                                 127,
                                 128,
                                 255,
                                 256,
                                 65535,
                                 65536,
                                 int64_t{1} << 48,
                                 (int64_t{1} << 48) + 1,
                                 kMost<int32_t>,
                                 int64_t{kMost<int32_t>} + 1,
                                 -int64_t{kMost<int32_t>} - 1,
                                 kMost<uint32_t>,
                                 kMost<int64_t>,
                                 kMost<int64_t> - 1,
                                 -kMost<int64_t> - 1};

}  // namespace

// splitmix64
uint64_t Mutator::Next() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

Bytes Mutator::Mutate(const Bytes& input, const Bytes& other, size_t most) {
  Bytes bytes = input;
  for (size_t changes = size_t{1} << Below(4); changes > 0; --changes) Change(other, &bytes);
  if (bytes.size() > most) bytes.resize(most);
  return bytes;
}

void Mutator::Change(const Bytes& other, Bytes* bytes) {
  const size_t size = bytes->size();
  const size_t at = Below(size + 1);
  const auto begin = bytes->begin() + static_cast<std::ptrdiff_t>(at);
  const auto overwrite = [&](const void* data, size_t count) {
    if (std::min(count, size - at) > 0) std::memcpy(bytes->data() + at, data, std::min(count, size - at));
  };
  switch (Below(11)) {
    case 0:  // a bit
      if (at < size) (*bytes)[at] ^= static_cast<uint8_t>(1u << Below(8));
      break;
    case 1:  // a byte
      if (at < size) (*bytes)[at] = static_cast<uint8_t>(Next());
      break;
    case 2: {  // a byte, by a little
      if (at < size) (*bytes)[at] = static_cast<uint8_t>((*bytes)[at] + Below(9) - 4);
      break;
    }
    case 3:  // cut
      bytes->resize(at);
      break;
    case 4: {  // a part taken out
      const size_t count = std::min(size - at, 1 + Below(16));
      bytes->erase(begin, begin + static_cast<std::ptrdiff_t>(count));
      break;
    }
    case 5: {  // a part twice
      const Bytes part(begin, begin + static_cast<std::ptrdiff_t>(std::min(size - at, 1 + Below(64))));
      bytes->insert(bytes->begin() + static_cast<std::ptrdiff_t>(Below(size + 1)), part.begin(), part.end());
      break;
    }
    case 6: {  // noise
      Bytes noise(1 + Below(16));
      for (uint8_t& byte : noise) byte = static_cast<uint8_t>(Next());
      bytes->insert(begin, noise.begin(), noise.end());
      break;
    }
    case 7: {  // the other's end
      const size_t from = Below(other.size() + 1);
      bytes->resize(at);
      bytes->insert(bytes->end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
      break;
    }
    case 8: {  // the other's middle
      const size_t from = Below(other.size() + 1);
      overwrite(other.data() + from, std::min(other.size() - from, 1 + Below(32)));
      break;
    }
    case 9: {
      const double number = kDoubles[Below(std::size(kDoubles))];
      overwrite(&number, sizeof(number));
      break;
    }
    case 10: {
      const int64_t number = kIntegers[Below(std::size(kIntegers))];
      overwrite(&number, size_t{1} << Below(4));
      break;
    }
  }
}

}  // namespace fuzz
}  // namespace poseidon
