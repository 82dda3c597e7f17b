// A Status leaving C++ as an exception, also out of autograd's backward. What kind of exception is for whoever
// links these sources to define: python/python_error.h for the extension. So none of them includes Python's headers,
// which take longer to compile than most of these sources.
#pragma once

#include "core/base/status.h"

namespace poseidon {

[[noreturn]] void Throw(const Status& status);

inline void ThrowIfError(const Status& status) {
  if (!status.ok()) Throw(status);
}

}  // namespace poseidon
