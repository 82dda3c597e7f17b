// How ranks come to one plan. All of them call the same methods at the same step; each is a few gathers of small
// messages:
//
//   profile   what every rank saw; merged alike on all, or the same error on all
//   network   trial collectives, where the plan goes by time and nobody has given their costs
//   costs     what every rank's processor takes; of each number the median counts
//   plan      rank 0's choice
//   hash      of what was received and of the rank's own parameters; the same error on all if one differs
//
// Knows no gradients: what a rank saw and measures comes from callbacks. Not thread-safe. Blocks in collectives; the
// caller must not hold Python's lock.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/engine/engine.h"
#include "core/model/measurements.h"
#include "core/plan/chooser.h"
#include "core/plan/plan.h"
#include "core/plan/profile.h"
#include "core/plan/trials.h"

namespace poseidon {

class Agreement {
 public:
  struct Options {
    std::string prefix;  // of wire names: of one optimizer
    int process_set = 0;
    int rank = 0;  // in the process set
    ChooserSettings chooser;
    NetworkModel network;               // given by the user; measured if not known
    double network_budget_seconds = 0;  // CalibrationOptions::budget_seconds; 0: its default
  };

  // What only this rank knows when a plan is made. Called by the thread that is in Agree().
  struct Local {
    std::function<std::vector<LocalTensor>()> tensors;  // in order
    std::function<RankProfile()> profile;
    // Called on all ranks at the same time, so that ranks which share cores measure each other too.
    std::function<ComputeCosts(const MergedProfile&)> costs;
    // On rank 0: all of the question but profile and what was measured.
    std::function<void(const MergedProfile&, Question*)> question;
  };

  // engine: outlives the agreement.
  Agreement(Engine* engine, Options options, Local local);

  bool by_time() const;

  // which: part of the wire name. first: before there is a plan, when ranks must also agree on what is sparse. A
  // difference that ranks cannot train with is kInvalidArgument, the same on every rank.
  Status GatherProfiles(const std::string& which, bool first, MergedProfile* merged);

  // in_force: the plan of the steps before, without decisions before the first; has given `steps` timed steps since the
  // last Agree(). forget: what was tried before counts no more. *plan fits this rank's parameters.
  Status Agree(const Plan& in_force, int64_t steps, bool forget, Plan* plan);

  // Of the last Agree().
  const MergedProfile& profile() const { return profile_; }
  const Measured& measured() const { return measured_; }
  // This rank's own, by tensor; empty before the first measurement.
  const std::vector<LayerCost>& my_costs() const { return my_costs_; }

 private:
  Status Gather(const std::string& which, const std::vector<uint8_t>& mine, std::vector<std::vector<uint8_t>>* all);
  Status Measure();
  std::vector<uint8_t> Decide(const Plan& in_force, int64_t steps, bool forget);
  Status Receive(const std::vector<uint8_t>& mine, Plan* plan);

  Engine* const engine_;
  const Options options_;
  const Local local_;
  MergedProfile profile_;
  Measured measured_;
  std::vector<LayerCost> my_costs_;
  Trials trials_;  // rank 0's
};

}  // namespace poseidon
