// Text to an enumerator, by its Name(), so that each spelling is written once.
#pragma once

#include <string>
#include <vector>

#include "core/base/status.h"

namespace poseidon {

// Leaves *out alone on failure, which lists the good spellings.
template <typename T>
Status ParseNamed(const char* what, const std::string& text, const std::vector<T>& values, T* out) {
  std::string good;
  for (T value : values) {
    if (text == Name(value)) {
      *out = value;
      return Status::OK();
    }
    good += (good.empty() ? "" : ", ") + std::string(Name(value));
  }
  return Status::InvalidArgument("unknown " + std::string(what) + " \"" + text + "\"; use one of: " + good);
}

}  // namespace poseidon
