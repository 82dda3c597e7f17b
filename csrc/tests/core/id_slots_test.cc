#include "core/schemes/id_slots.h"

#include <map>
#include <random>

#include "tests/check.h"

namespace poseidon {
namespace {

TEST(SlotsInOrderOfAppearance) {
  IdSlots slots;
  POSEIDON_CHECK(slots.empty());
  POSEIDON_CHECK_EQ(slots.Find(7), IdSlots::npos);
  POSEIDON_CHECK_EQ(slots.SlotOf(7), size_t{0});
  POSEIDON_CHECK_EQ(slots.SlotOf(0), size_t{1});
  POSEIDON_CHECK_EQ(slots.SlotOf(7), size_t{0});
  POSEIDON_CHECK_EQ(slots.SlotOf(0xffffffffu), size_t{2});
  POSEIDON_CHECK_EQ(slots.ids(), std::vector<uint32_t>{7, 0, 0xffffffffu});
  POSEIDON_CHECK_EQ(slots.Find(0), size_t{1});
  POSEIDON_CHECK_EQ(slots.Find(1), IdSlots::npos);
}

TEST(AgainstAMap) {
  std::mt19937 random(1);
  IdSlots slots;
  for (uint32_t range : {3u, 1000u, 0xffffffffu}) {
    slots.Clear();
    POSEIDON_CHECK(slots.empty());
    std::map<uint32_t, size_t> expected;
    for (int i = 0; i < 20000; ++i) {
      const uint32_t id = random() % range;
      POSEIDON_CHECK_EQ(slots.SlotOf(id), expected.try_emplace(id, expected.size()).first->second);
    }
    POSEIDON_CHECK_EQ(slots.size(), expected.size());
    for (const auto& [id, slot] : expected) POSEIDON_CHECK_EQ(slots.Find(id), slot);
  }
}

TEST(NeighbouringAndStridedIds) {
  for (uint32_t stride : {1u, 64u, 4096u, 1u << 20}) {
    IdSlots slots;
    for (uint32_t i = 0; i < 4000; ++i) POSEIDON_CHECK_EQ(slots.SlotOf(i * stride), size_t{i});
  }
}

}  // namespace
}  // namespace poseidon
