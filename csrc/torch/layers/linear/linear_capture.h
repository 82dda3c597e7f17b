// Capture of sufficient factors where every linear call passes: PyTorch's dispatcher.
//
// Calls whose weight is registered record a node that hands (x, d) to the layer's owner in backward; every other call
// (no gradient wanted, unknown weight, subclass, transform, tracing) runs PyTorch's own code as if this file did not
// exist.
#pragma once

#include <torch/library.h>

namespace poseidon {

// `library` implements aten for AutogradCPU.
void AddLinearKernel(torch::Library& library);

}  // namespace poseidon
