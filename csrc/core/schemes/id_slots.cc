#include "core/schemes/id_slots.h"

#include <algorithm>

namespace poseidon {

size_t IdSlots::Find(uint32_t id) const {
  if (table_.empty()) return npos;
  for (size_t at = Hash(id);; ++at) {
    const uint32_t entry = table_[at & mask_];
    if (entry == 0) return npos;
    if (ids_[entry - 1] == id) return entry - 1;
  }
}

void IdSlots::Clear() {
  ids_.clear();
  std::fill(table_.begin(), table_.end(), 0);
}

void IdSlots::Grow() {
  constexpr size_t kSmallest = 64;
  table_.assign(std::max(kSmallest, 2 * table_.size()), 0);
  mask_ = table_.size() - 1;
  for (size_t slot = 0; slot < ids_.size(); ++slot) {
    size_t at = Hash(ids_[slot]);
    while (table_[at & mask_] != 0) ++at;
    table_[at & mask_] = static_cast<uint32_t>(slot + 1);
  }
}

}  // namespace poseidon
