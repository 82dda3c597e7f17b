// One gradient alone, allreduced as it is.
#pragma once

#include <memory>
#include <string>

#include "core/schemes/dense_exchange.h"
#include "torch/routes/grad_source.h"
#include "torch/routes/route.h"

namespace poseidon {

class WholeRoute final : public Route {
 public:
  // planned: by the plan's layout, whose messages are counted.
  WholeRoute(RouteContext& context, Parameter& parameter, bool planned);

  // Also for routes that must send a member's gradient whole in some step.
  void Send();

  void OnComplete(Parameter& member, bool fresh) override;
  void Flush(Parameter& member) override;
  Status Finish(Parameter& member) override;
  std::shared_ptr<Route> Successor() override;

 private:
  Parameter& parameter() const { return *members().front(); }

  const bool planned_;
  std::shared_ptr<GradSource> source_;
  std::shared_ptr<DenseExchange> exchange_;
  at::ScalarType type_ = at::kFloat;  // that the exchange sends
};

// A parameter's gradient as Horovod's compression sends it.
std::shared_ptr<GradSource> NewGradSource(const RouteContext& context, const Parameter& parameter);
// On this thread the user's compressor is running: Python code, with the session's lock held.
bool InCompressor();
// At the end of its exchange: puts the result where the gradient is now.
Status FinishGradSource(const RouteContext& context, const Parameter& parameter, GradSource& source);

}  // namespace poseidon
