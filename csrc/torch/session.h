// One distributed optimizer: its parameters, their hooks, and the lock. How a gradient travels is its
// route's (routes/route.h); what ranks agree on is Planning's.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/engine/engine.h"
#include "core/engine/stats.h"
#include "core/plan/plan.h"
#include "torch/accumulator_hook.h"
#include "torch/evidence.h"
#include "torch/layers/capture.h"
#include "torch/membership.h"
#include "torch/options.h"
#include "torch/parameter.h"
#include "torch/planning.h"
#include "torch/progress.h"
#include "torch/routes/context.h"
#include "torch/routes/router.h"
#include "torch/step.h"
#include "torch/step_clock.h"
#include "torch/walk_end.h"

namespace poseidon {

// Hooks call in on autograd's threads; everything else is called by the training thread. No method needs Python's lock,
// and those that block must be called without it.
class Session final : public CaptureOwner,
                      public WalkEnd::Owner,
                      public AccumulatorHook::Owner,
                      public std::enable_shared_from_this<Session> {
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
  Session(std::shared_ptr<Engine> engine, SessionOptions options);

  bool Capture(FactoredLayer& layer, at::ScalarType type, const std::function<void(bool)>& append)
      POSEIDON_REQUIRES(mutex_);
  void NoteProgress() POSEIDON_REQUIRES(mutex_);
  std::vector<int> Which(bool (*wanted)(const Parameter&)) const;

  const SessionOptions options_;

  mutable Mutex mutex_;
  RouteContext context_ POSEIDON_GUARDED_BY(mutex_);
  std::vector<Parameter> parameters_ POSEIDON_GUARDED_BY(mutex_);
  Progress progress_ POSEIDON_GUARDED_BY(mutex_);
  StepClock clock_ POSEIDON_GUARDED_BY(mutex_);
  Membership membership_ POSEIDON_GUARDED_BY(mutex_);
  Evidence evidence_ POSEIDON_GUARDED_BY(mutex_);
  Router router_ POSEIDON_GUARDED_BY(mutex_);
  Planning planning_ POSEIDON_GUARDED_BY(mutex_);
  Step step_ POSEIDON_GUARDED_BY(mutex_);
  WalkEnd walk_end_ POSEIDON_GUARDED_BY(mutex_);
  bool hooks_after_ POSEIDON_GUARDED_BY(mutex_) = false;
};

}  // namespace poseidon
