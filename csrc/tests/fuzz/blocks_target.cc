// What was gathered of all ranks' control messages: how many ranks there are, then the bytes.
#include <algorithm>

#include "core/engine/gather_bytes.h"
#include "tests/fuzz/fuzz.h"

namespace poseidon {
namespace fuzz {
namespace {

Bytes Joined(const std::vector<Bytes>& blocks) {
  Bytes all;
  for (const Bytes& block : blocks) {
    const Bytes framed = FrameBlock(block);
    all.insert(all.end(), framed.begin(), framed.end());
  }
  return all;
}

Bytes Input(const std::vector<Bytes>& blocks) {
  const Bytes all = Joined(blocks);
  Bytes input(1 + all.size(), static_cast<uint8_t>(blocks.size()));
  std::copy(all.begin(), all.end(), input.begin() + 1);
  return input;
}

std::vector<Bytes> Seeds() {
  return {Input({{}}), Input({{1, 2, 3}, {}, Bytes(300, 7)}), Input({{0, 0, 0, 0, 0, 0, 0, 0}, {1}})};
}

bool Run(const Bytes& input) {
  if (input.empty()) return false;
  const Bytes gathered(input.begin() + 1, input.end());
  const int size = input[0];
  std::vector<Bytes> by_rank;
  const uint64_t before = AllocatedBytes();
  const bool read = SplitBlocks(gathered, size, "poseidon.0.agree.profile", &by_rank).ok();
  FUZZ_REQUIRE(AllocatedBytes() - before <= MostAllocated(gathered.size()) + 256 * static_cast<uint64_t>(size));
  if (!read) return false;
  FUZZ_REQUIRE(by_rank.size() == static_cast<size_t>(size) && Joined(by_rank) == gathered);
  return true;
}

}  // namespace

const Target kBlocksTarget = {"blocks", "one block per rank, which join to the same bytes", Seeds, Run};

}  // namespace fuzz
}  // namespace poseidon
