// What Throw is where there is no Python.
#include <stdexcept>

#include "torch/status_error.h"

namespace poseidon {

void Throw(const Status& status) { throw std::runtime_error(status.ToString()); }

}  // namespace poseidon
