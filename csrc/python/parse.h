// Text of the user's, parsed by the core.
#pragma once

#include <string>

#include "core/base/status.h"
#include "torch/status_error.h"

namespace poseidon {

template <typename T>
T Parse(Status (*parse)(const std::string&, T*), const std::string& text) {
  T value;
  ThrowIfError(parse(text, &value));
  return value;
}

}  // namespace poseidon
