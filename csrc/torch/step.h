// One step of a session after the other: from the first pass that reaches a parameter to reduced gradients in place.
//
//   pass       counted by its parameter; complete after the last one (Session), which hands it to the route
//   meet       step 0, once: ranks compare what they have, before any of them waits for a gradient
//   backward   the last eager gradient is sent: this rank waits for those and goes on (ReduceInBackward)
//   end        what has not been sent is, and everything is waited for (Synchronize)
//   discarded  the user has cleared the reduced gradients: the step begins anew (Discard)
//   abandoned  something failed, or the user has loaded a state: what is in flight is left to itself (Reset)
#pragma once

#include <vector>

#include "torch/evidence.h"
#include "torch/membership.h"
#include "torch/parameter.h"
#include "torch/planning.h"
#include "torch/progress.h"
#include "torch/routes/context.h"
#include "torch/routes/router.h"
#include "torch/step_clock.h"

namespace poseidon {

// A backward pass more than backward_passes_per_step.
Status TooManyPasses(const std::string& parameter);

// Guarded by the session's mutex, which it lets go of while it waits for other ranks, or runs code of the user's.
class Step {
 public:
  struct Parts {
    RouteContext& context;
    std::vector<Parameter>& parameters;
    Progress& progress;
    StepClock& clock;
    Membership& membership;
    Evidence& evidence;
    Router& router;
    Planning& planning;
  };
  explicit Step(const Parts& parts);

  // Idempotent: also notices parameters that were unfrozen, and accumulators that PyTorch replaced (module.to(dtype)).
  void Attach();
  // The first gradient of the step is about to be complete.
  void OnFirstComplete();
  // A pass reaches the parameter. fresh: its gradient is this pass's alone.
  void AdmitPass(Parameter& parameter, bool fresh);
  // The user's hook before reduction.
  void RunHook(Parameter& parameter);
  // From every hook: asks who takes part, and sends what was held for the answer.
  void FollowMembership(bool gradient_is_complete);
  // backward() may have to wait at its end, as far as this rank knows.
  bool MayWait() const;

  // As the session's.
  bool ReduceInBackward();
  void Synchronize();
  void NoteWait();
  void Reset();
  bool Discard();

 private:
  bool SomeWereCleared() const;
  bool NeedsAllRanks() const;
  void WaitForRanks();
  void WaitForMembers();
  bool MeetFirst();
  void NoteWhoIsFrozen();
  void SendRest(bool all);
  void Collect(bool all);
  void Finish();
  void End(bool abandoned);
  void Abandon();

  RouteContext& context_;
  std::vector<Parameter>& parameters_;
  Progress& progress_;
  StepClock& clock_;
  Membership& membership_;
  Evidence& evidence_;
  Router& router_;
  Planning& planning_;
  // Of this step.
  bool tried_to_meet_ = false;
  bool attached_ = false;
  Status gradient_error_;  // what could not be put into place
};

}  // namespace poseidon
