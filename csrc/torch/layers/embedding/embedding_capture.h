// Capture of touched rows where every call of an embedding passes: PyTorch's dispatcher.
//
// Calls of aten::embedding and aten::embedding_bag (sum and mean) whose table is registered record a node that hands
// (ids, d) to the table's owner in backward; every other call runs PyTorch's own code as if this file did not exist.
#pragma once

#include <torch/library.h>

namespace poseidon {

// `library` implements aten for AutogradCPU.
void AddEmbeddingKernels(torch::Library& library);

}  // namespace poseidon
