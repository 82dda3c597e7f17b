// The other half of the scheme that only tests have (tests/core/halves_scheme.h): its whole route, in the one file that
// a scheme of the product has in torch/routes. Each half of the gradient is an allreduce of its own.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/schemes/dense_exchange.h"
#include "tests/core/halves_scheme.h"
#include "torch/routes/grad_parts.h"
#include "torch/routes/registry.h"
#include "torch/routes/route.h"
#include "torch/routes/whole_route.h"
#include "torch/status_error.h"

namespace poseidon {

inline const Scheme kHalves = Register(MakeHalvesRule());

class HalvesRoute final : public Route {
 public:
  HalvesRoute(RouteContext& context, Parameter& parameter)
      : Route(context, {&parameter}),
        source_(NewGradSource(context, parameter)),
        halves_(std::make_shared<GradParts>(source_, 2)) {}

  void OnComplete(Parameter& p, bool) override { Send(p); }
  void Flush(Parameter& p) override { Send(p); }
  Status Finish(Parameter& p) override { return FinishGradSource(context_, p, *source_); }

  // What is in flight keeps its source.
  std::shared_ptr<Route> Successor() override {
    for (const auto& exchange : exchanges_) {
      if (InFlight(exchange.get())) return std::make_shared<HalvesRoute>(context_, *members().front());
    }
    return shared_from_this();
  }

 private:
  void Send(Parameter& p) {
    ThrowIfError(halves_->Prepare());
    exchanges_.clear();
    for (int half = 0; half < 2; ++half) {
      const std::string name = context_.WireName("half", p.name + "." + std::to_string(half));
      exchanges_.push_back(std::make_shared<DenseExchange>(
          name, std::vector<DenseExchange::Member>{{name, halves_->Part(half)}}, context_.ReductionOfOne(p),
          context_.options.process_set, context_.options.size, kHalves));
    }
    for (const auto& exchange : exchanges_) context_.Submit(exchange, members());
    p.counter.MarkSent();
  }

  const std::shared_ptr<GradSource> source_;
  const std::shared_ptr<GradParts> halves_;
  std::vector<std::shared_ptr<DenseExchange>> exchanges_;  // of this step
};

inline std::shared_ptr<Route> MakeHalvesRoute(const RouteRequest& request) {
  return std::make_shared<HalvesRoute>(request.context, request.parameter);
}

}  // namespace poseidon
