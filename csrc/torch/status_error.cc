#include "torch/status_error.h"

namespace poseidon {

namespace {

std::array<PyObject*, static_cast<size_t>(StatusCode::kAssertion) + 1>& PythonTypes() {
  static std::array<PyObject*, static_cast<size_t>(StatusCode::kAssertion) + 1> types{};
  return types;
}

}  // namespace

PyObject* StatusError::python_type() {
  PyObject* type = PythonTypes()[static_cast<size_t>(code_)];
  return type != nullptr ? type : PyExc_RuntimeError;
}

void StatusError::SetPythonType(StatusCode code, PyObject* type) { PythonTypes()[static_cast<size_t>(code)] = type; }

}  // namespace poseidon
