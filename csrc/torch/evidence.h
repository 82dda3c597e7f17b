// What this rank knows of its parameters, for the plan: which layers could send factors or rows, whether those gave the
// very gradient when they were looked at, and why not.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/plan/profile.h"
#include "torch/layers/embedding/embedding_layer.h"
#include "torch/layers/linear/linear_layer.h"
#include "torch/parameter.h"
#include "torch/routes/context.h"

namespace poseidon {

// Guarded by the session's mutex.
class Evidence {
 public:
  Evidence(RouteContext& context, std::vector<Parameter>& parameters);
  ~Evidence();

  // The parameter wants a gradient for the first time: its candidates are looked at until a plan covers them.
  void Attach(Parameter& parameter);
  // Its gradient is complete in .grad and has not been sent: the guard's moment.
  void Check(const Parameter& parameter);
  // Before an agreement: gradients of fewer passes than configured have not been checked yet.
  void CheckIncomplete();
  std::vector<TensorProfile> Profiles() const;
  // The plan of that number is in force, made from what ranks know of the parameter together.
  void Follow(Parameter& parameter, const MergedTensor& merged, int64_t plan);
  // Unless a route captures the parameter's factors, its calls take PyTorch's own path. They stay registered, since a
  // later plan may choose it. One without calls on this rank is looked at when they come.
  void BypassUnlessCaptured(const Parameter& parameter);
  // From now on this rank speaks against anything but a dense gradient, until it is looked at again.
  void Object(Parameter& parameter, const std::string& reason, int64_t plan);
  // What spoke against a layer may be gone later: an odd step, such as one under a profiler, or one that overflowed. So
  // it is looked at again, each time after twice as many plans.
  void Refuse(Parameter& parameter, int64_t plan);
  // In the step after which plan number `plan` is due.
  void LookAgain(int64_t plan);
  // The step's rows are no longer counted.
  void EndStep();
  // What is still looked at begins anew. planned: some plan is in force.
  void Restart(bool planned);

 private:
  bool MayFactor(const Parameter& parameter, SchemeOverride wish) const;
  bool CanFactor() const;
  std::string WhyNoLayer(const Parameter& parameter) const;
  std::string CoveredBias(const Parameter& parameter) const;
  void FillTableProfile(const Parameter& parameter, TensorProfile* tensor) const;
  void ChooseCandidate(Parameter& parameter, const TensorProfile& profile);
  bool InGroup(const Parameter& parameter) const { return grouped_[parameter.index]; }

  RouteContext& context_;
  std::vector<Parameter>& parameters_;
  std::vector<bool> grouped_;
  std::vector<std::shared_ptr<FactoredLayer>> profiled_;  // the layers that are looked at in this step
};

}  // namespace poseidon
