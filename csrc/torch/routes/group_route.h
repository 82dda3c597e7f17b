// A group that the user has asked for: its gradients are negotiated together, when all are complete.
#pragma once

#include <memory>
#include <vector>

#include "core/schemes/dense_exchange.h"
#include "torch/routes/grad_source.h"
#include "torch/routes/route.h"

namespace poseidon {

class GroupRoute final : public Route {
 public:
  GroupRoute(RouteContext& context, std::vector<Parameter*> members);

  bool makes_dense() const override { return true; }
  void OnComplete(Parameter& member, bool fresh) override;
  void Flush(Parameter& member) override;
  Status Finish(Parameter& member) override;
  std::shared_ptr<Route> Successor() override;

 private:
  void Send();

  std::vector<std::shared_ptr<GradSource>> sources_;  // by member
  std::shared_ptr<DenseExchange> exchange_;
};

}  // namespace poseidon
