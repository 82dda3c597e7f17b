// What Throw (torch/status_error.h) throws in the extension: PyTorch hands it to Python as an exception of the type
// that belongs to its StatusCode, also out of autograd's backward. Include it once, in the module's source.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <array>
#include <cstddef>

#include "core/base/status.h"
#include "torch/status_error.h"

namespace poseidon {

class PythonError final : public torch::PyTorchError {
 public:
  explicit PythonError(const Status& status) : torch::PyTorchError(status.message()), code_(status.code()) {}

  PyObject* python_type() override {
    PyObject* type = Types()[static_cast<size_t>(code_)];
    return type != nullptr ? type : PyExc_RuntimeError;
  }

  // The one table of StatusCode -> Python exception type; set once when the module is imported. Types are borrowed for
  // ever.
  static void SetType(StatusCode code, PyObject* type) { Types()[static_cast<size_t>(code)] = type; }

 private:
  using Table = std::array<PyObject*, static_cast<size_t>(StatusCode::kAssertion) + 1>;
  static Table& Types() {
    static Table types{};
    return types;
  }

  const StatusCode code_;
};

void Throw(const Status& status) { throw PythonError(status); }

}  // namespace poseidon
