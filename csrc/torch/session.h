// One distributed optimizer: its parameters, their hooks, what is in flight, and the agreed plan.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/base/pass_counter.h"
#include "core/engine/census.h"
#include "core/engine/engine.h"
#include "core/engine/ordered_sender.h"
#include "core/engine/scalar_sum.h"
#include "core/engine/stats.h"
#include "core/plan/agreement.h"
#include "core/plan/chooser.h"
#include "core/plan/dense_layout.h"
#include "core/plan/plan.h"
#include "core/plan/profile.h"
#include "core/plan/schedule.h"
#include "core/schemes/dense_exchange.h"
#include "core/schemes/sfb_exchange.h"
#include "torch/layers/capture.h"
#include "torch/layers/compute_calibration.h"
#include "torch/layers/embedding/embedding_layer.h"
#include "torch/layers/linear/linear_layer.h"
#include "torch/routes/grad_parts.h"
#include "torch/routes/grad_pool.h"
#include "torch/routes/grad_source.h"

namespace poseidon {

struct SessionOptions {
  std::vector<std::string> names;  // unique; one per parameter, in the same order on every rank
  std::vector<at::Tensor> params;
  std::vector<std::vector<int>> groups;  // of parameter indices; parameters in no group travel alone
  Reduction reduction;
  int passes_per_step = 1;
  CompressionKind compression = CompressionKind::kNone;
  // For kPython: parameter index and gradient -> what to send.
  std::function<at::Tensor(int, const at::Tensor&)> compress;
  bool sparse_as_dense = false;
  int process_set = 0;
  int rank = 0;  // in the process set
  int size = 1;
  std::string tag;  // makes wire names unique per optimizer
  Policy policy = Policy::kBytes;
  std::vector<SchemeOverride> overrides;                                // one per parameter
  int64_t max_gathered_elements = std::numeric_limits<int64_t>::max();  // of one allgather, all ranks together
  std::string settings;  // what must be equal on all ranks, one "key=value" per line
  NetworkModel network;  // for what goes by time; measured if not known
  DenseSettings dense;
  double gather_memory_bytes = 2e9;  // TimeChoiceSettings
  bool uneven_steps = false;         // ranks may call hvd.join() while others go on
  bool reduce_in_backward = true;    // backward() returns reduced gradients (session_reduce.cc)
  // Where reducing needs Python (sparse gradients, its compressors, hooks after reduction): calls BeginReduce() and
  // Collect().
  std::function<void()> reduce;
  // A hook of the user's own, called with a complete local gradient before it is sent; it may change it in place.
  // Python code.
  std::function<void(int, const at::Tensor&)> before;
  std::vector<bool> hooked;  // by parameter: `before` is called for it, so it is not factored. Empty: for none
};

// Hooks call in on autograd's threads; everything else is called by the training thread. No method needs Python's lock,
// and those that block must be called without it.
class Session final : public CaptureOwner, public std::enable_shared_from_this<Session> {
 public:
  static std::shared_ptr<Session> Create(std::shared_ptr<Engine> engine, SessionOptions options);
  ~Session() override;

  // Enqueues everything that has not been sent: zeros, or no rows, for what got no gradient. In step 0 also agrees on
  // the plan. Returns the parameters whose sparse gradients the caller must exchange now, the same list on all ranks.
  std::vector<int> Flush();

  using Compressed = std::vector<std::pair<int, at::Tensor>>;
  // Waits for everything, sets gradients, and starts a new step. On failure the step is dropped and the error thrown.
  // Returns the parameters whose gradients are to be decompressed by the caller (CompressionKind::kPython), with what
  // was received.
  Compressed Finish();

  // ---- At the end of the outermost backward() in which this rank has sent its last gradient that all ranks send
  // (session_reduce.cc). Nothing if it is not that one; else the parameters whose sparse gradients the caller must
  // exchange now, the same on all ranks.
  std::optional<std::vector<int>> BeginReduce();
  // Waits for those gradients and sets them. The step goes on; what is left comes with Flush() and Finish().
  Compressed Collect();
  // The user has discarded the step's gradients. False, and nothing happens, while some are complete and not reduced.
  bool Discard();
  // Whether `reduce` must be called though no gradient needs it: for hooks after reduction.
  void SetHooksAfter(bool any);

  // Forgets the step in progress (load_state_dict; elastic recovery relies on it). Waits a little for what is in
  // flight.
  void Reset();

  void SetPassesPerStep(int passes);
  // The optimizer has just zeroed the gradients. Before backward this is where a step begins.
  void NoteZeroed();
  // The optimizer's own step, which follows synchronize(), is over.
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

  // The hook on the gradient accumulator of parameter `index`; incoming: the gradient that was added to .grad, or
  // became it.
  void OnAccumulated(int index, const at::Tensor& incoming);
  // A callback of autograd at the end of a walk, and a hook in a walk that had another one inside.
  void OnWalkEnd();
  void OnOuterWalk();

 private:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    NodePtr accumulator;  // keeps the hook alive; null while the parameter wants no gradient
    uintptr_t hook_key = 0;
    bool active = false;  // has wanted a gradient at some time: takes part in every step from then on
    PassCounter counter{1};
    std::shared_ptr<GradSource> source;
    std::shared_ptr<DenseExchange> exchange;
    at::ScalarType exchange_type = at::kFloat;  // that it sends
    std::shared_ptr<FactoredLayer> layer;       // of a matrix: candidate linear weight, or what the plan captures
    std::shared_ptr<EmbeddingLayer> table;      // of a matrix, until it is known what it is: candidate embedding table
    int layer_weight =
        -1;  // index of the weight whose SFB or row-sparse exchange carries this gradient (itself, or for its bias)
    int group = -1;
    int slice = -1;  // of the plan's layout, and its place in it
    int slot = -1;
    std::shared_ptr<GradParts> parted;  // the layout sends it in parts
    std::vector<int> parts;             // indices into parts_
    bool sparse = false;                // agreed: some rank has sparse gradients for it
    bool sparse_now = false;            // this rank has one in this step
    bool own = true;                    // no other optimizer had it before
    bool hooked = false;                // agreed: the user's hook looks at its gradient before it is sent
    bool hook_ran = false;              // in this step
    bool everywhere = false;  // agreed: every rank completed its gradient in backward when that was looked at last
    bool eager = false;       // so did all that travel with it: backward() may wait for it without waiting in a circle
    bool collected = false;   // in this step: reduced and in place
    bool sent_without = false;          // in this step: NoteWait() sent that there is none
    int refusals = 0;                   // agreed: how often its factors were looked at in vain, or given up
    int64_t retry_plan = 0;             // agreed: the number of the plan for which they are looked at again
    int order = -1;                     // this step: which of the complete gradients it was
    double ready_seconds = -1;          // this step: gradient complete, or factors sent; from the step's beginning
    std::vector<double> ready_history;  // of the last steps, as if everything were dense
  };
  // SFB of one layer, or row-sparse of one table.
  struct Factored {
    int weight = -1;
    int bias = -1;
    std::shared_ptr<SfbExchange> exchange;
    bool held = false;  // complete, but not sent before it is known that no rank is missing
  };
  struct Group {
    std::vector<int> members;
    std::shared_ptr<DenseExchange> exchange;
    bool sent = false;
  };

  // Of the layout: several gradients in one buffer, or one alone.
  struct Slice {
    std::vector<int> members;
    std::shared_ptr<GradPool> pool;
    std::shared_ptr<DenseExchange> exchange;
    bool sent = false;
  };
  struct Part {
    std::shared_ptr<DenseExchange> exchange;
    double bytes = 0;
  };

  // What is on its way, and whose gradients it carries.
  struct InFlight {
    std::shared_ptr<Exchange> exchange;
    std::vector<int> params;
  };

  enum class Presence : uint8_t { kNotAsked, kAsked, kAllAreHere, kSomeAreMissing };

  Session(std::shared_ptr<Engine> engine, SessionOptions options);

  // All below: mutex_ held.
  void Attach();
  bool CanFactor() const;
  bool MayFactor(const Parameter& parameter, SchemeOverride wish) const;
  // append(last_pass) adds a call's rows to the layer's message. False: they are not taken.
  bool Capture(FactoredLayer& layer, at::ScalarType type, const std::function<void(bool)>& append);
  Factored* FactoredOf(const Parameter& parameter);
  void SendDense(Parameter& parameter);
  void SendGroupIfReady(Group& group, bool complete);
  void SendFactorsIfReady(Factored& factored);
  // True: the factors are on their way. They may have been sent before, be held, or have been made a dense gradient.
  bool SendFactors(Factored& factored);
  bool NothingElseCanAdd(const Factored& factored) const;
  void CheckProfile(Parameter& parameter);
  void ThrowIfFailed(const Status& status) const;
  void Submit(const std::shared_ptr<Exchange>& exchange, std::vector<int> params);
  std::shared_ptr<GradSource> NewSource(const Parameter& p) const;
  void EndStep();
  void AbandonStep();

  // Allreduces (session_dense.cc).
  bool GoesByTime() const;
  bool MayShare(const Parameter& parameter) const;
  at::ScalarType DenseWireType(const Parameter& parameter) const;
  std::vector<bool> WhichMayShare(const MergedProfile& profile) const;
  void MakeSlices();
  void AddPart(const DenseSlice& slice);
  void SendByPlan(Parameter& parameter, bool fresh = false);
  const Slice* SharedSliceOf(const Parameter& parameter) const;
  Reduction ReductionOf(const Parameter& parameter) const;
  GradPool& PoolOf(Slice& slice);
  void SendSlice(Slice& slice);
  void CompleteSlice(Slice& slice);
  void SendParts(Parameter& parameter);
  void CountSlice(const DenseSource& source, int64_t bytes, int64_t messages = 1);
  void EndStepOfSlices();

  // Ranks that are in hvd.join() (session_presence.cc).
  bool NeedsAllRanks() const;
  void AskWhoIsHere();
  void ReadWhoIsHere();
  void WaitForWhoIsHere();
  bool SomeRankIsMissing() const { return presence_ == Presence::kSomeAreMissing; }
  void FollowPresence(bool gradient_is_complete);
  bool MayGather(Factored& factored);
  void SendWithoutFactors(const Factored& factored);
  void SendSparseAsDense(Parameter& parameter);

  // Reduction in backward() (session_reduce.cc).
  bool NeedsPythonToReduce();  // takes the lock
  void ChooseEager();
  void NoteProgress();
  void QueueWalkEnd();
  bool MeetFirst();
  Compressed CollectLocked(bool all, std::unique_lock<std::mutex>* lock);
  Status FinishParameter(size_t index, Compressed* compressed);
  bool DiscardLocked();

  // Which parameters want a gradient (session_presence.cc).
  void AskWhoWants();
  void CheckWhoWants();

  // The user's hook (session_hooks.cc). Lets go of the lock meanwhile.
  void RunHook(Parameter& parameter, std::unique_lock<std::mutex>* lock);

  // Agreement (session_plan.cc).
  bool PlanIsDue() const;
  bool PutOffWhileRanksAreMissing();
  std::vector<int> SendRest(bool all);
  void AgreeIfDue();
  Agreement MakeAgreement();
  Status AgreeOnPlan();
  ComputeCosts MeasureCosts(const MergedProfile& profile);
  RankProfile LocalProfile() const;
  std::string WhyNoLayer(const Parameter& p) const;
  std::string CoveredBias(const Parameter& p) const;
  void FillTableProfile(const Parameter& p, TensorProfile* tensor) const;
  static bool IsFactored(Scheme scheme) { return scheme == Scheme::kSfb || scheme == Scheme::kRowSparse; }
  void ChooseCandidate(Parameter& p, const TensorProfile& profile);
  double ExpectedRows(const Factored& factored) const;
  std::vector<const TensorDecision*> UnusedButFactored(const MergedProfile& profile) const;
  void AdoptPlan();
  void StartFactored(int weight_index);
  void DecideBias(const Factored& factored, Scheme scheme);
  void RenewFactored(Factored& factored);
  void StopFactored(int weight_index, const std::string& reason);
  void RemoveFactored(int weight_index);
  void Refuse(Parameter& weight);
  void LookAgain();
  void NoteRows();
  void ForgetSteps();

  // Timing of steps (session_timing.cc).
  double SinceStepBegan() const;
  void NoteReady(Parameter& parameter);
  void NoteReady(const Factored& factored);
  void RecordTimeline();
  void RecordStep();
  std::shared_ptr<SfbExchange> NewSfbExchange(const Factored& factored) const;
  std::shared_ptr<LinearLayer> NewLayer(const Parameter& p) const;
  std::shared_ptr<EmbeddingLayer> NewTable(const Parameter& p) const;
  double FactorScale() const;
  std::string WireName(const char* kind, const std::string& name) const;

  const std::shared_ptr<Engine> engine_;
  const SessionOptions options_;
  const WireFormat wire_format_;

  mutable std::mutex mutex_;  // guards everything below
  std::vector<Parameter> parameters_;
  std::vector<Group> groups_;
  std::vector<Slice> slices_;
  std::vector<Part> parts_;
  std::shared_ptr<OrderedSender> sender_;  // of parts_
  int complete_ = 0;                       // gradients, in this step
  std::vector<Factored> factored_;
  std::vector<std::shared_ptr<FactoredLayer>> profiled_;    // the layers that are looked at in this step
  std::vector<InFlight> in_flight_;                         // and not collected
  std::vector<std::pair<NodePtr, uintptr_t>> outer_hooks_;  // in walks around one that has completed the step
  int callback_walk_ = -1;                                  // for whose end a callback is queued
  int eager_count_ = 0;  // parameters that are eager, and how many of them are complete in this step
  int settled_ = 0;
  int walks_ = 0;  // of this step, that completed gradients; the last of them; and of the last step that had any
  int last_walk_ = -1;
  int usual_walks_ = 0;
  bool met_ = false;              // the ranks have compared their parameters, in step 0
  bool tried_to_meet_ = false;    // in this step
  bool attached_ = false;         // in this step
  bool some_are_frozen_ = false;  // agreed: not all parameters have wanted a gradient yet, so more may
  bool asked_who_wants_ = false;  // in this step
  std::shared_ptr<Census> who_wants_;
  bool timeline_recorded_ = false;  // in this step
  bool hooks_after_ = false;
  Status gradient_error_;                    // of this step: of what could not be put into place
  double idle_seconds_ = 0;                  // in this step, between backward() and synchronize()
  Clock::time_point reduced_at_;             // the last Collect() ended
  Presence presence_ = Presence::kNotAsked;  // in this step; only with uneven_steps
  std::shared_ptr<ScalarSum> ranks_here_;
  bool planned_ = false;
  Plan plan_;
  Plan next_plan_;  // agreed in this step, in force from the next
  PlanSchedule schedule_;
  Agreement agreement_;
  bool adopt_next_plan_ = false;
  int64_t steps_under_plan_ = 0;   // that were timed since it was looked at last
  bool first_under_plan_ = false;  // the next step is the first with its schemes or slices

  Clock::time_point step_began_ = Clock::now();
  Clock::time_point finished_ = Clock::now();  // the last synchronize()
  double update_seconds_ = 0;                  // of the last optimizer step
  std::vector<double> compute_history_;        // as ready_history, for the whole step
  double first_step_seconds_ = 0;              // of step 0, without the agreement at its end
  Clock::time_point flushed_;         // backward was over: the last synchronize() began, or what backward() does of it
  Clock::time_point last_done_;       // step 0: the end of the last exchange that began before
  std::vector<double> step_history_;  // of the last steps under the plan in force, synchronize() included
  ComputeCalibration calibration_;
  SessionStats stats_;
  std::vector<std::string> warnings_;
};

}  // namespace poseidon
