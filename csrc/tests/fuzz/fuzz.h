// Fuzzing of everything that is decoded from bytes of another process, without a library: fuzz_main.cc feeds mutated
// inputs to a target, which checks a property of its own and ends the process where it does not hold. Inputs are a
// function of the seed (and, in a build that traces coverage, of which code they reached), so a failure comes again.
// One thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace poseidon {
namespace fuzz {

using Bytes = std::vector<uint8_t>;

struct Target {
  const char* name;
  const char* property;
  // Valid inputs to start from.
  std::vector<Bytes> (*seeds)();
  // True if the input was accepted. Every seed is.
  bool (*run)(const Bytes& input);
};

// One per decoder; *_target.cc.
extern const Target kProfileTarget, kPlanTarget, kMeasurementsTarget, kBlocksTarget, kFactorsTarget, kNumbersTarget,
    kTextTarget;

// Ends the process with the input in a file if the property does not hold.
void Require(bool holds, const char* file, int line, const char* what);
#define FUZZ_REQUIRE(...) ::poseidon::fuzz::Require((__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)

// Bytes asked of operator new so far, freed or not.
uint64_t AllocatedBytes();
// What a decoder may ask for, whatever its input of `size` bytes says: a count in it must not become an allocation.
constexpr uint64_t MostAllocated(size_t size) { return 64 * uint64_t{size} + (16 << 10); }

// Reads an input as a list of choices; zeros when it has ended.
class Choices {
 public:
  explicit Choices(const Bytes& input, size_t begin = 0) : input_(input), at_(begin) {}

  uint64_t Word(size_t bytes = 8) {
    uint64_t word = 0;
    for (size_t i = 0; i < bytes; ++i) word |= uint64_t{at_ < input_.size() ? input_[at_++] : uint8_t{0}} << (8 * i);
    return word;
  }
  // Less than `count`.
  size_t Below(size_t count) { return static_cast<size_t>(Word(1)) % count; }
  bool Flag() { return Below(2) == 1; }
  // Any bits.
  double Double() {
    const uint64_t bits = Word();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  size_t left() const { return input_.size() - std::min(at_, input_.size()); }

 private:
  const Bytes& input_;
  size_t at_;
};

}  // namespace fuzz
}  // namespace poseidon
