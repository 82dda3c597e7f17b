// A gradient in parts, which travel in an agreed order with bounded bytes in flight, so that what the next forward
// needs first may overtake (method priority; docs/dense.md).
#pragma once

#include <memory>
#include <vector>

#include "core/engine/ordered_sender.h"
#include "core/plan/dense_layout.h"
#include "torch/routes/grad_parts.h"
#include "torch/routes/route.h"

namespace poseidon {

class PartsRoute;

// All parts of a layout. Its routes share it, because what travels has one order.
class PartsLayout {
 public:
  struct Item {
    Parameter* parameter;
    int part = 0;
    int parts = 1;
  };
  // The routes of a layout, one per parameter.
  static std::vector<std::shared_ptr<PartsRoute>> MakeRoutes(RouteContext& context, std::vector<Item> order);

  void Ready(size_t position) { sender_->Ready(position); }
  bool in_flight() const;
  // A new step: nothing is in flight.
  void Reset() { sender_->Reset(); }
  // The route that takes over for that parameter; the same new layout for all.
  std::shared_ptr<PartsRoute> SuccessorOf(const Parameter& parameter);

 private:
  PartsLayout(RouteContext& context, std::vector<Item> order) : context_(context), order_(std::move(order)) {}

  RouteContext& context_;
  const std::vector<Item> order_;
  std::vector<std::shared_ptr<DenseExchange>> exchanges_;  // by position
  std::shared_ptr<OrderedSender> sender_;
  std::vector<std::shared_ptr<PartsRoute>> successors_;
};

class PartsRoute final : public Route {
 public:
  PartsRoute(RouteContext& context, Parameter& parameter, int parts, std::shared_ptr<PartsLayout> layout);

  // Part `part` of the gradient, at that place of the order.
  std::shared_ptr<DenseExchange> AddPart(int part, size_t position);

  void OnComplete(Parameter& member, bool fresh) override;
  void Flush(Parameter& member) override;
  Status Finish(Parameter& member) override;
  void EndStep() override { layout_->Reset(); }
  std::shared_ptr<Route> Successor() override;

 private:
  struct Part {
    std::shared_ptr<DenseExchange> exchange;
    size_t position = 0;  // in the layout's order
  };

  void Send();

  const std::shared_ptr<GradSource> source_;
  const std::shared_ptr<GradParts> whole_;
  const std::shared_ptr<PartsLayout> layout_;
  std::vector<Part> parts_;
};

}  // namespace poseidon
