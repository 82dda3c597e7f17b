// Bytes, step model and chooser for planners in Python.
#pragma once

#include <pybind11/pybind11.h>

namespace poseidon {

// Adds the submodule `model`.
void BindModel(pybind11::module_& extension);

}  // namespace poseidon
