// A sparse gradient as Horovod sends it: the ranks' indices and values, one behind the other.
#pragma once

#include <memory>

#include "torch/routes/route.h"
#include "torch/routes/whole_route.h"

namespace poseidon {

class SparseRoute final : public Route {
 public:
  SparseRoute(RouteContext& context, Parameter& parameter);

  bool gathers() const override { return true; }
  // In synchronize(), or with the last eager gradient: a rank without one joins in with no rows.
  void OnComplete(Parameter&, bool) override {}
  void Flush(Parameter& member) override;
  Status Finish(Parameter& member) override;
  std::shared_ptr<Route> Successor() override;

 private:
  class Gathered;

  void MakeSparse(Parameter& parameter);

  std::shared_ptr<Gathered> gathered_;
  WholeRoute whole_;  // for steps in which some rank has joined: dense, which needs no gather
  bool sent_whole_ = false;
};

}  // namespace poseidon
