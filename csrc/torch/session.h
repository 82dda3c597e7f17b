// One distributed optimizer: its parameters, their hooks, and the steps they go through. How a gradient travels is its
// route's (routes/route.h); what ranks must agree on is Agreement's.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/engine/engine.h"
#include "core/engine/stats.h"
#include "core/plan/plan.h"
#include "core/plan/profile.h"
#include "core/plan/selector.h"
#include "torch/evidence.h"
#include "torch/layers/capture.h"
#include "torch/layers/compute_calibration.h"
#include "torch/membership.h"
#include "torch/options.h"
#include "torch/parameter.h"
#include "torch/progress.h"
#include "torch/routes/context.h"
#include "torch/routes/router.h"
#include "torch/step_clock.h"
#include "torch/walk_end.h"

namespace poseidon {

// Hooks call in on autograd's threads; everything else is called by the training thread. No method needs Python's lock,
// and those that block must be called without it.
class Session final : public CaptureOwner, public WalkEnd::Owner, public std::enable_shared_from_this<Session> {
 public:
  static std::shared_ptr<Session> Create(std::shared_ptr<Engine> engine, SessionOptions options);
  ~Session() override;

  // Sends everything that has not been sent: zeros, or no rows, for what got no gradient. Waits for everything, sets
  // gradients, and starts a new step. In step 0, and whenever one is due, agrees on a plan. On failure the step is
  // dropped and the error thrown.
  void Synchronize();
  // At the end of the outermost backward() in which this rank has sent the last gradient that all ranks send there
  // (progress.h): waits for those gradients and sets them. The step goes on. False, and nothing happens, if it is not
  // that backward().
  bool ReduceInBackward();
  // The user has discarded the step's gradients. False, and nothing happens, while some are complete and not reduced.
  bool Discard();
  // Whether `reduce` of the options must be called: for hooks after reduction.
  void SetHooksAfter(bool any);

  // Forgets the step in progress (load_state_dict; elastic recovery relies on it). Waits a little for what is in
  // flight.
  void Reset();

  void SetPassesPerStep(int passes);
  // The optimizer has just zeroed the gradients. Before backward this is where a step begins.
  void NoteZeroed();
  // The optimizer's own step, which follows Synchronize(), is over.
  void NoteUpdated();
  // The training thread is about to wait for a collective of the script's own.
  void NoteWait();
  // This rank calls hvd.join(), after which all ranks go on together, whatever number of steps each has done before.
  void NoteJoin();

  // The sum over the ranks that are not in hvd.join(). Blocks; all of them must call it, any number of times.
  double SumOverRanks(const std::string& what, double value);

  // ---- Views for Python: Horovod's private attributes, reports.
  std::vector<int> TouchedParameters() const;
  std::vector<int> CollectedParameters() const;  // in this step, before its end
  std::vector<int> Delays() const;
  std::vector<int> ActiveParameters() const;
  // The plan in force; without decisions until step 0 is over.
  Plan CurrentPlan() const;
  SessionStats Stats() const;
  // Messages for the user since the last call; the caller turns them into warnings.
  std::vector<std::string> TakeWarnings();

  // ---- CaptureOwner
  void OnProfiled(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias) override;
  void OnProfiled(EmbeddingLayer& layer, const TableRows& rows) override;
  bool OnCaptured(LinearLayer& layer, const at::Tensor& x, const at::Tensor& d) override;
  bool OnCaptured(EmbeddingLayer& layer, const TableRows& rows) override;
  void OnDeclined(FactoredLayer& layer) override;
  void OnUnattached() override;

  // ---- WalkEnd::Owner
  void OnWalkEnd() override;
  void OnOuterWalk() override;

  // The hook on the gradient accumulator of parameter `index`; incoming: the gradient that was added to .grad, or
  // became it.
  void OnAccumulated(int index, const at::Tensor& incoming);

 private:
  using Lock = std::unique_lock<std::mutex>;

  Session(std::shared_ptr<Engine> engine, SessionOptions options);

  // All below: mutex_ held. Those that get the lock let go of it while they wait.
  void Attach();
  void OnFirstComplete();
  bool Capture(FactoredLayer& layer, at::ScalarType type, const std::function<void(bool)>& append);
  void AdmitPass(Parameter& parameter, bool cleared);
  void RunHook(Parameter& parameter, Lock* lock);
  void NoteProgress();

  // The step's stations.
  bool NeedsAllRanks() const;
  void FollowMembership(bool gradient_is_complete);
  void WaitForMembers(Lock* lock);
  void CheckWhoWants(Lock* lock);
  bool MeetFirst(Lock* lock);
  void SendRest(bool all);
  void Collect(bool all, Lock* lock);
  void FinishStep();
  void EndStep();
  void AbandonStep();
  bool DiscardLocked();
  void NoteFlushed();
  std::vector<int> Which(bool (*wanted)(const Parameter&)) const;

  // Agreement (session_agreement.cc).
  bool GoesByTime() const;
  bool PlanIsDue() const;
  bool PutOffWhileRanksAreMissing();
  void RestartPlanClock();
  void AgreeIfDue(Lock* lock);
  Status GatherProfiles(const char* which, MergedProfile* merged);
  Status AgreeOnPlan();
  Status Calibrate();
  RankProfile LocalProfile() const;
  Status ReceivePlan();
  void LayOutSlices(const SelectorSettings& settings, Plan* plan);
  bool MayShare(const Parameter& parameter) const;
  void NoteTried();
  void KeepUnused(Plan* plan) const;
  void AdoptPlan();
  void DecideMembers(const Route& route);
  void GiveUp(Parameter& parameter, const std::string& reason);
  double ExpectedRows(const Parameter& weight) const;
  void NoteRows();

  const SessionOptions options_;

  mutable std::mutex mutex_;  // guards everything below
  RouteContext context_;
  std::vector<Parameter> parameters_;
  Progress progress_;
  StepClock clock_;
  Membership membership_;
  Evidence evidence_;
  Router router_;
  WalkEnd walk_end_;
  bool met_ = false;            // the ranks have compared their parameters, in step 0
  bool tried_to_meet_ = false;  // in this step
  bool attached_ = false;       // in this step
  bool hooks_after_ = false;
  Status gradient_error_;  // of this step: of what could not be put into place
  std::vector<std::string> warnings_;

  bool planned_ = false;
  Plan plan_;
  Plan next_plan_;                // agreed in this step, in force from the next
  MergedProfile merged_profile_;  // what it was made from
  bool adopt_next_plan_ = false;
  int64_t plan_clock_ = 0;       // steps, the same number on all ranks: since the last join()
  int64_t next_plan_at_ = 0;     // on that clock
  int64_t plans_ = 0;            // made so far, the same number on all ranks
  int plan_changes_ = 0;         // after trials, the same number on all ranks
  int steps_of_other_rows_ = 0;  // in a row, in which some factored layer had far other rows than the plan expects
  NetworkModel network_;
  ComputeCalibration calibration_;
  std::vector<LayerCost> my_costs_;  // per parameter, as this rank measured them
  TimeInputs time_inputs_;           // agreed
};

}  // namespace poseidon
