#include "core/engine/census.h"

#include <vector>

#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

// What every rank finds when rank r has hashes[r].
std::vector<bool> Differ(const std::vector<uint64_t>& hashes) {
  const int size = static_cast<int>(hashes.size());
  LocalWorld world(size);
  std::vector<int> differ(size);
  RunRanks(size, [&](int rank) {
    auto census = std::make_shared<Census>("census", 0, size);
    for (int step = 0; step < 2; ++step) {  // it can be used again
      census->SetHash(hashes[rank]);
      POSEIDON_CHECK_OK(world.engines[rank]->Submit(census));
      POSEIDON_CHECK_OK(world.engines[rank]->Wait({census}));
      POSEIDON_CHECK(census->complete());
      differ[rank] = census->differs();
    }
  });
  return std::vector<bool>(differ.begin(), differ.end());
}

TEST(EqualSets) {
  for (uint64_t hash : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}, uint64_t{0x123456789abcdef}}) {
    for (int size : {1, 2, 5})
      POSEIDON_CHECK(Differ(std::vector<uint64_t>(size, hash)) == std::vector<bool>(size, false));
  }
}

// Also on the rank whose number is the mean of all.
TEST(AnyDifferenceIsSeenByAll) {
  POSEIDON_CHECK(Differ({9, 10, 11}) == std::vector<bool>(3, true));
  POSEIDON_CHECK(Differ({7, 7, 7, 8}) == std::vector<bool>(4, true));
  POSEIDON_CHECK(Differ({0, 1}) == std::vector<bool>(2, true));
}

}  // namespace
}  // namespace poseidon
