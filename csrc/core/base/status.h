// Result of anything that can fail for an expected reason. The core throws no exceptions: at the Python binding one
// table maps StatusCode to exception types, so a new code needs a new row there.
#ifndef POSEIDON_CORE_STATUS_H_
#define POSEIDON_CORE_STATUS_H_

#include <string>
#include <utility>

namespace poseidon {

enum class StatusCode {
  kOk,
  kInvalidArgument,     // the user gave something wrong, or ranks disagree on what they gave
  kFailedPrecondition,  // a right call at a wrong time
  kAborted,             // shut down while the work was in flight, or before it was sent
  kInternal,            // a bug of ours
  kUnavailable,         // the transport itself failed; elastic training may recover
  kOutOfMemory,         // this rank has no memory for what is gathered
  kAssertion,           // misuse for which Python raises AssertionError; last
};

const char* Name(StatusCode code);

// Immutable value; safe to copy between threads.
class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status OK() { return Status(); }
  static Status InvalidArgument(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
  static Status FailedPrecondition(std::string message) {
    return {StatusCode::kFailedPrecondition, std::move(message)};
  }
  static Status Aborted(std::string message) { return {StatusCode::kAborted, std::move(message)}; }
  static Status Internal(std::string message) { return {StatusCode::kInternal, std::move(message)}; }
  static Status Unavailable(std::string message) { return {StatusCode::kUnavailable, std::move(message)}; }
  static Status OutOfMemory(std::string message) { return {StatusCode::kOutOfMemory, std::move(message)}; }
  static Status Assertion(std::string message) { return {StatusCode::kAssertion, std::move(message)}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  // Says what, which tensor and rank, expected and got, what to do. Empty when ok().
  const std::string& message() const { return message_; }
  // "OK" or "<code>: <message>", for logs and tests.
  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace poseidon

#endif  // POSEIDON_CORE_STATUS_H_
