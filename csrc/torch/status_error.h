// A Status leaving C++ as a Python exception, also out of autograd's backward.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <array>
#include <string>

#include "core/base/status.h"

namespace poseidon {

class StatusError final : public torch::PyTorchError {
 public:
  explicit StatusError(const Status& status) : torch::PyTorchError(status.message()), code_(status.code()) {}
  PyObject* python_type() override;

  // The one table of StatusCode -> Python exception type; set once when the module is imported. Types are borrowed for
  // ever.
  static void SetPythonType(StatusCode code, PyObject* type);

 private:
  const StatusCode code_;
};

inline void ThrowIfError(const Status& status) {
  if (!status.ok()) throw StatusError(status);
}

}  // namespace poseidon
