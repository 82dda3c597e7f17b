// PyTorch reports by exception, the core by Status.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <new>
#include <string>

#include "core/base/status.h"

namespace poseidon {

// Runs body() without gradient recording; an exception becomes kInternal naming what failed. An error raised in Python
// code that body() calls is not caught: it travels on to Python as it is.
template <typename Body>
Status Catching(const std::string& what, Body body) {
  at::NoGradGuard no_grad;
  try {
    return body();
  } catch (const c10::Error& error) {
    return Status::Internal(what + ": " + error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return Status::Internal(what + ": out of memory");
  }
}

}  // namespace poseidon
