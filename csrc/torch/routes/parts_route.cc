#include "torch/routes/parts_route.h"

#include <algorithm>
#include <string>
#include <utility>

#include "torch/dtypes.h"
#include "torch/routes/whole_route.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

constexpr double kCreditInThetas = 2;  // one part may wait behind the one that travels

}  // namespace

std::vector<std::shared_ptr<PartsRoute>> PartsLayout::MakeRoutes(RouteContext& context, std::vector<Item> order) {
  const std::shared_ptr<PartsLayout> layout(new PartsLayout(context, std::move(order)));
  std::vector<std::shared_ptr<PartsRoute>> routes;
  std::vector<OrderedSender::Item> sent;
  auto theta = static_cast<double>(context.options.dense.theta);  // where it is too small, parts are larger
  for (const Item& item : layout->order_) {
    Parameter& p = *item.parameter;
    auto route = std::find_if(routes.begin(), routes.end(),
                              [&](const std::shared_ptr<PartsRoute>& each) { return each->members().front() == &p; });
    if (route == routes.end())
      route = routes.insert(route, std::make_shared<PartsRoute>(context, p, item.parts, layout));
    const size_t position = layout->exchanges_.size();
    layout->exchanges_.push_back((*route)->AddPart(item.part, position));
    const int64_t bytes = p.tensor.numel() * static_cast<int64_t>(c10::elementSize(context.DenseWireType(p)));
    sent.push_back({layout->exchanges_.back(), static_cast<double>(bytes) / item.parts});
    theta = std::max(theta, sent.back().bytes);
  }
  layout->sender_ = std::make_shared<OrderedSender>(context.engine.get(), kCreditInThetas * theta, std::move(sent));
  layout->sender_->Attach();
  return routes;
}

bool PartsLayout::in_flight() const {
  return std::any_of(exchanges_.begin(), exchanges_.end(),
                     [](const auto& exchange) { return exchange->state() == Exchange::State::kInFlight; });
}

std::shared_ptr<PartsRoute> PartsLayout::SuccessorOf(const Parameter& parameter) {
  if (successors_.empty()) successors_ = MakeRoutes(context_, order_);
  return *std::find_if(successors_.begin(), successors_.end(),
                       [&](const auto& route) { return route->members().front() == &parameter; });
}

PartsRoute::PartsRoute(RouteContext& context, Parameter& parameter, int parts, std::shared_ptr<PartsLayout> layout)
    : Route(context, {&parameter}),
      source_(NewGradSource(context, parameter)),
      whole_(std::make_shared<GradParts>(source_, parts)),
      layout_(std::move(layout)) {}

std::shared_ptr<DenseExchange> PartsRoute::AddPart(int part, size_t position) {
  const Parameter& p = *members().front();
  const std::string name = context_.WireName("part", p.name + "." + std::to_string(part));
  const Reduction reduction = context_.engine->transport().KeepApart(
      context_.options.reduction, ToDType(context_.DenseWireType(p)), static_cast<int>(position));
  auto exchange = std::make_shared<DenseExchange>(name, std::vector<DenseExchange::Member>{{name, whole_->Part(part)}},
                                                  reduction, context_.options.process_set, context_.options.size);
  parts_.push_back({exchange, position});
  return exchange;
}

void PartsRoute::OnComplete(Parameter&, bool) { Send(); }

void PartsRoute::Flush(Parameter&) { Send(); }

void PartsRoute::Send() {
  ThrowIfError(whole_->Prepare());
  for (const Part& part : parts_) {
    context_.Admit(part.exchange, members());
    layout_->Ready(part.position);
  }
  members().front()->counter.MarkSent();
}

Status PartsRoute::Finish(Parameter& p) {
  context_.CountMessage(*source_, p.tensor.numel() * static_cast<int64_t>(c10::elementSize(context_.DenseWireType(p))),
                        static_cast<int64_t>(parts_.size()));
  return FinishGradSource(context_, p, *source_);
}

std::shared_ptr<Route> PartsRoute::Successor() {
  if (layout_->in_flight()) return layout_->SuccessorOf(*members().front());
  layout_->Reset();
  return shared_from_this();
}

}  // namespace poseidon
