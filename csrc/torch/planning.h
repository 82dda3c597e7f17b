// A session's plan: when ranks agree on one, what this rank contributes, and what follows from it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/plan/agreement.h"
#include "core/plan/plan.h"
#include "core/plan/profile.h"
#include "core/plan/schedule.h"
#include "torch/evidence.h"
#include "torch/layers/compute_calibration.h"
#include "torch/membership.h"
#include "torch/parameter.h"
#include "torch/routes/context.h"
#include "torch/routes/router.h"
#include "torch/step_clock.h"

namespace poseidon {

// Guarded by the session's mutex, which it lets go of while it waits for other ranks.
class Planning {
 public:
  struct Parts {
    RouteContext& context;
    std::vector<Parameter>& parameters;
    Evidence& evidence;
    Router& router;
    StepClock& clock;
    Membership& membership;
  };
  explicit Planning(const Parts& parts);

  bool planned() const { return planned_; }
  const Plan& plan() const { return plan_; }
  // Messages for the user, once.
  std::vector<std::string> TakeWarnings() { return std::exchange(warnings_, {}); }

  // Ranks compare what parameters they have, and which of their gradients are complete. Once, before any of them waits
  // for a gradient; false while ranks are missing. Throws, on all ranks, where they differ.
  bool Meet();
  bool met() const { return met_; }
  // They are known to differ: throws, on all ranks, what in.
  void TellDifference();

  // At the end of step 0, and whenever a later plan is to be made. The same on all ranks.
  bool Due() const;
  // Makes a plan, if one is due and no rank is missing. In force from the end of the step.
  void AgreeIfDue();
  // A step in which all ranks took part has ended well: looks how many rows were gathered. Before EndStep().
  void NoteRows();
  // The step is over, or abandoned.
  void EndStep(bool abandoned);
  // Of a route that cannot go on.
  struct Objection {
    Parameter* parameter;
    std::string reason;
  };
  // A step has ended well. After EndStep().
  void FinishStep(const std::vector<Objection>& objections);
  // This rank calls hvd.join(), after which all go on together.
  void NoteJoin() { schedule_.Restart(); }

  // For the clock: backward is over.
  void NoteFlushed();
  bool GoesByTime() const { return agreement_.by_time(); }

 private:
  Agreement MakeAgreement();
  RankProfile LocalProfile() const;
  ComputeCosts MeasureCosts(const MergedProfile& profile);
  bool MayShare(const Parameter& parameter) const;
  void Ask(const MergedProfile& profile, Question* question) const;
  bool PutOffWhileRanksAreMissing();
  void GatherProfiles(const char* which, MergedProfile* merged);
  void Adopt();
  void DecideMembers(const Route& route);
  void GiveUp(Parameter& parameter, const std::string& reason);
  double ExpectedRows(const Parameter& parameter) const;

  RouteContext& context_;
  std::vector<Parameter>& parameters_;
  Evidence& evidence_;
  Router& router_;
  StepClock& clock_;
  Membership& membership_;

  bool met_ = false;
  bool planned_ = false;
  Plan plan_;
  Plan next_plan_;  // agreed in this step
  bool adopt_next_plan_ = false;
  PlanSchedule schedule_;
  ComputeCalibration calibration_;
  Agreement agreement_;
  std::vector<std::string> warnings_;
};

}  // namespace poseidon
