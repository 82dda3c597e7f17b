#include "core/engine/first_failure.h"

namespace poseidon {

void FirstFailure::Note(const Status& status) {
  if (first_.ok()) first_ = status;
  ++count_;
}

void FirstFailure::NoteBreakdown(const Status& status) {
  Note(status);
  breakdown_ = count_;
}

void FirstFailure::NoteSuccess(uint64_t began) {
  if (began == count_ && !first_.ok()) Forget();
}

Status FirstFailure::Explain(const std::string& name, const Status& status) const {
  if (status.code() != StatusCode::kAborted || first_.ok()) return status;
  const StatusCode code = first_.code() == StatusCode::kOutOfMemory ? first_.code() : status.code();
  return Status(code, first_.message() + " Because of that " + name + " was not exchanged.");
}

}  // namespace poseidon
