// Which failure came first. When a transport goes down, everything in flight fails, and so does everything sent later;
// what the user must read is the failure that brought it down.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/status.h"

namespace poseidon {

// Guarded by the engine's mutex.
class FirstFailure {
 public:
  // How many failures there have been. What begins now keeps the number.
  uint64_t count() const { return count_; }

  // A failure, named. Not one that only follows from another (kAborted).
  void Note(const Status& status);
  // A failure after which the transport shuts down on this rank, so that what began before it may never end.
  void NoteBreakdown(const Status& status);
  // What began at count `began` has succeeded. If it began after the last failure, then that one did not bring the
  // transport down, and later failures have nothing to do with it.
  void NoteSuccess(uint64_t began);
  // What comes has nothing to do with what was.
  void Forget() { first_ = Status::OK(); }

  // The status of `name`; where it only follows from a failure, it says from which.
  Status Explain(const std::string& name, const Status& status) const;

  bool LostInBreakdown(uint64_t began) const { return began < breakdown_; }
  // OK if there is none that may still matter.
  const Status& first() const { return first_; }

 private:
  Status first_;
  uint64_t count_ = 0;
  uint64_t breakdown_ = 0;  // count_ just after it
};

}  // namespace poseidon
