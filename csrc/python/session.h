// The class Session of poseidon_hvd._C.
#pragma once

#include <pybind11/pybind11.h>

namespace poseidon {

void BindSession(pybind11::module_& m);

}  // namespace poseidon
