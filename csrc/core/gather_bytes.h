// Small control data, where ranks must agree: each rank contributes bytes, every rank receives all of them in rank order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/engine.h"
#include "core/status.h"

namespace poseidon {

// Blocks until done. All ranks of the process set must call it with the same name; a rank may contribute nothing.
Status GatherBytes(Engine& engine, const std::string& name, int process_set, const std::vector<uint8_t>& mine,
                   std::vector<std::vector<uint8_t>>* by_rank);

}  // namespace poseidon
