// Sufficient factors of a linear layer, or touched rows of an embedding table: captured in backward, gathered, and
// rebuilt into the weight's gradient and its bias's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/schemes/sfb_exchange.h"
#include "torch/layers/factored_layer.h"
#include "torch/routes/registry.h"
#include "torch/routes/route.h"
#include "torch/routes/whole_route.h"

namespace poseidon {

class FactorsRoute final : public Route {
 public:
  // layer: captures. bias: whose gradient its rows give too; null: none.
  FactorsRoute(RouteContext& context, std::shared_ptr<FactoredLayer> layer, Parameter& weight, Parameter* bias);
  ~FactorsRoute() override;

  // One call's rows in backward: append(last_pass) adds them to the message. True: nothing else can add to the layer's
  // gradients in this step, and they are complete.
  bool OnCall(int walk, const std::function<void(bool)>& append);

  bool gathers() const override { return true; }
  bool OnPass(Parameter& member, int walk) override;
  void OnComplete(Parameter&, bool) override {}
  void Flush(Parameter& member) override;
  Status Finish(Parameter& member) override;
  void OnMembership() override;
  void EndStep() override { held_ = sent_whole_ = false; }
  std::shared_ptr<Route> Successor() override;
  void Retire() override;

  std::string Objection() const override;
  int64_t GatheredRows() const override { return exchange_->gathered_rows(); }
  void CountStep(SessionStats* stats) const override;
  const Exchange* Rebuilds() const override { return exchange_.get(); }

 private:
  Parameter& weight() const { return *members().front(); }
  void SendIfComplete();
  // True: the factors are on their way. They may have been sent before, be held, or have been made a dense gradient.
  bool Send();
  bool MayGather();
  bool NothingElseCanAdd(int walk) const;

  const std::shared_ptr<FactoredLayer> layer_;
  std::shared_ptr<SfbExchange> exchange_;
  std::vector<std::unique_ptr<WholeRoute>> whole_;  // by member: for steps in which some rank has joined
  bool held_ = false;                               // complete, but not sent before it is known that no rank is missing
  bool sent_whole_ = false;                         // in this step
};

// By a plan that factors the parameter, whose candidate layer captures from now on.
std::shared_ptr<Route> MakeFactorsRoute(const RouteRequest& request);

}  // namespace poseidon
