// A set of ids in the order of their first appearance: id -> slot 0, 1, 2, ... Merges the rows of an embedding table
// that a step touches, without an array as long as the table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace poseidon {

// Not thread-safe.
class IdSlots {
 public:
  // The slot of an id, which becomes size() - 1 if the id is new.
  size_t SlotOf(uint32_t id) {
    if (2 * (ids_.size() + 1) > table_.size()) Grow();
    for (size_t at = Hash(id);; ++at) {
      uint32_t& entry = table_[at & mask_];
      if (entry == 0) {
        ids_.push_back(id);
        entry = static_cast<uint32_t>(ids_.size());
        return ids_.size() - 1;
      }
      if (ids_[entry - 1] == id) return entry - 1;
    }
  }

  // Without adding it; npos if it is not there.
  static constexpr size_t npos = static_cast<size_t>(-1);
  size_t Find(uint32_t id) const;

  // By slot.
  const std::vector<uint32_t>& ids() const { return ids_; }
  size_t size() const { return ids_.size(); }
  bool empty() const { return ids_.empty(); }

  // Keeps its memory.
  void Clear();

 private:
  // Neighbouring ids, which are common, land far apart.
  size_t Hash(uint32_t id) const { return static_cast<size_t>((id * uint64_t{0x9e3779b97f4a7c15}) >> 32); }
  void Grow();

  std::vector<uint32_t> ids_;
  std::vector<uint32_t> table_;  // slot + 1, 0: free; at most half full; its size is a power of 2
  size_t mask_ = 0;
};

}  // namespace poseidon
