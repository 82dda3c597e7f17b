// Small control data, where ranks must agree: each rank contributes bytes, every rank receives all of them in rank
// order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/engine/engine.h"

namespace poseidon {

// Blocks until done. All ranks of the process set, `size` of them, must call it with the same name; a rank may
// contribute nothing. On success by_rank has one block of each.
Status GatherBytes(Engine& engine, const std::string& name, int process_set, int size, const std::vector<uint8_t>& mine,
                   std::vector<std::vector<uint8_t>>* by_rank);

// A block as it travels, and what was gathered of them cut into the blocks of `size` ranks; anything else fails, and
// names `name`. Apart from the above for tests.
std::vector<uint8_t> FrameBlock(const std::vector<uint8_t>& mine);
Status SplitBlocks(const std::vector<uint8_t>& gathered, int size, const std::string& name,
                   std::vector<std::vector<uint8_t>>* by_rank);

}  // namespace poseidon
