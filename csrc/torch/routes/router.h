// Gives every parameter its route: of the plan's scheme, or else of the dense layout.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/plan/plan.h"
#include "core/plan/profile.h"
#include "torch/routes/route.h"

namespace poseidon {

// Guarded by the session's mutex.
class Router {
 public:
  Router(RouteContext& context, std::vector<Parameter>& parameters);

  // The plan is in force from now on, between steps.
  void Follow(const Plan& plan, const MergedProfile& merged);
  // By the plan in force some scheme's own route carries this parameter's gradient, not for another parameter.
  bool HasOwnScheme(const Parameter& parameter) const;
  // Whether that plan would give the parameter another route of a scheme's own, or one instead of none, or none.
  bool Changes(const Parameter& parameter, const Plan& plan) const;
  // Between steps: the scheme's route is given up, for all its members.
  void GiveUp(Parameter& parameter);
  // Ranks have agreed that the parameter's gradients are sparse, or that they are not.
  void FollowSparse() { ChooseAll(); }
  // The step is abandoned: every route that has something in flight gets a successor.
  void Abandon();
  void EndStep();

  // Each route once, whether in use or not.
  void ForEach(const std::function<void(Route&)>& visit) const;

 private:
  void LayOut(const Plan& plan);
  void Choose(Parameter& parameter);
  void ChooseAll();
  void NoteGathers();

  RouteContext& context_;
  std::vector<Parameter>& parameters_;
  // By parameter. What it has of these is tried in this order.
  std::vector<std::shared_ptr<Route>> scheme_;  // the plan's; also of those that travel along
  std::vector<Scheme> own_;                     // which scheme's
  std::vector<std::shared_ptr<Route>> sparse_;
  std::vector<std::shared_ptr<Route>> dense_;  // of the layout, or of the user's groups
  std::vector<DenseSlice> slices_;             // the layout in force
  DenseMethod method_ = DenseMethod::kFused;
};

}  // namespace poseidon
