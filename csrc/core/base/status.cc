#include "core/base/status.h"

namespace poseidon {

const char* Name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "OK";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kFailedPrecondition:
      return "failed precondition";
    case StatusCode::kAborted:
      return "aborted";
    case StatusCode::kInternal:
      return "internal error";
    case StatusCode::kUnavailable:
      return "unavailable";
    case StatusCode::kOutOfMemory:
      return "out of memory";
    case StatusCode::kAssertion:
      return "assertion";
  }
  return "unknown";
}

std::string Status::ToString() const { return ok() ? "OK" : std::string(Name(code_)) + ": " + message_; }

}  // namespace poseidon
