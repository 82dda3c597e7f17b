// Who takes part in this step: which ranks (with uneven_steps some may be in hvd.join()), and which parameters want a
// gradient on them. Ranks agree on either before any of them waits for what another one does not send.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/engine/census.h"
#include "core/engine/scalar_sum.h"
#include "torch/parameter.h"
#include "torch/routes/context.h"

namespace poseidon {

// Guarded by the session's mutex.
class Membership {
 public:
  // known: called when it has become known, in a step, whether all ranks take part.
  Membership(RouteContext& context, std::function<void()> known) : context_(context), known_(std::move(known)) {}

  // ---- Ranks in hvd.join(). They answer allreduces with zeros and cannot take part in a gather, so no rank may
  // enqueue one before all know that none is missing. They count themselves once a step; if one is missing, everything
  // is dense in that step.

  // Once a step, when the first gradient is complete: from then on, and not before, a rank is bound to end the step.
  // One that only computes a forward, or some of the backward passes, may still join.
  void Ask();
  // Looks whether the answer has come. Nothing else tells, until somebody waits for it.
  void Read();
  // Asks and waits, without the lock.
  void Wait();
  bool SomeRankIsMissing() const { return presence_ == Presence::kSomeAreMissing; }
  bool AllAreHere() const { return presence_ == Presence::kAllAreHere; }
  bool asked() const { return presence_ != Presence::kNotAsked; }
  bool Known() const { return AllAreHere() || SomeRankIsMissing(); }

  // ---- Parameters. One that is unfrozen is sent from then on, and a rank that has it alone would wait for the others
  // for ever. So while some are frozen ranks compare once a step who wants a gradient.
  void AskWhoWants(const std::vector<Parameter>& parameters);
  // Ranks have just compared their profiles, which say it for this step. A rank that met the others in its backward()
  // would ask once more in synchronize(), one that met them there would not.
  void NoteMet() { asked_who_wants_ = true; }
  // Waits, without the lock. True: ranks differ.
  bool WantsDiffer();
  void set_some_are_frozen(bool frozen) { some_are_frozen_ = frozen; }
  bool some_are_frozen() const { return some_are_frozen_; }

  void EndStep();

 private:
  enum class Presence : uint8_t { kNotAsked, kAsked, kAllAreHere, kSomeAreMissing };

  RouteContext& context_;
  const std::function<void()> known_;
  Presence presence_ = Presence::kNotAsked;
  std::shared_ptr<ScalarSum> ranks_here_;
  bool some_are_frozen_ = false;  // agreed: not all parameters have wanted a gradient yet, so more may
  bool asked_who_wants_ = false;  // in this step
  std::shared_ptr<Census> who_wants_;
};

}  // namespace poseidon
