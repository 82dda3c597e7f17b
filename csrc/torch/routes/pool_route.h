// Several gradients side by side in one buffer, in one allreduce, as the plan's layout merges them.
#pragma once

#include <memory>
#include <vector>

#include "core/schemes/dense_exchange.h"
#include "torch/routes/grad_pool.h"
#include "torch/routes/route.h"

namespace poseidon {

class PoolRoute final : public Route {
 public:
  // number: which message of the layout this is.
  PoolRoute(RouteContext& context, std::vector<Parameter*> members, int number);

  void OnComplete(Parameter& member, bool fresh) override;
  void Flush(Parameter& member) override;
  Status Finish(Parameter& member) override;
  void EndStep() override;
  std::shared_ptr<Route> Successor() override;
  double CopiedBytes(const Parameter& member) const override;

 private:
  GradPool& Pool();
  size_t SlotOf(const Parameter& member) const;
  void Send();

  const int number_;
  std::shared_ptr<GradPool> pool_;
  std::shared_ptr<DenseExchange> exchange_;
};

}  // namespace poseidon
