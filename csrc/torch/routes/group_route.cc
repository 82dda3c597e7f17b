#include "torch/routes/group_route.h"

#include <algorithm>
#include <utility>

#include "torch/routes/whole_route.h"

namespace poseidon {

GroupRoute::GroupRoute(RouteContext& context, std::vector<Parameter*> group) : Route(context, std::move(group)) {
  std::vector<DenseExchange::Member> wire;
  for (const Parameter* p : members()) {
    sources_.push_back(NewGradSource(context, *p));
    wire.push_back({context.WireName("allreduce", p->name), sources_.back()});
  }
  const std::string name = wire.front().wire_name;
  const SessionOptions& options = context.options;
  exchange_ =
      std::make_shared<DenseExchange>(name, std::move(wire), options.reduction, options.process_set, options.size);
}

void GroupRoute::OnComplete(Parameter&, bool) {
  const bool complete = std::all_of(members().begin(), members().end(), [](const Parameter* p) {
    return p->counter.ready() && (!p->hooked || p->step.hook_ran || !p->tensor.grad().defined());
  });
  if (complete && !members().front()->counter.sent()) Send();
}

void GroupRoute::Flush(Parameter&) { Send(); }

void GroupRoute::Send() {
  context_.Submit(exchange_, members());
  for (Parameter* p : members()) p->counter.MarkSent();
}

Status GroupRoute::Finish(Parameter& p) {
  const auto at = std::find(members().begin(), members().end(), &p) - members().begin();
  return FinishGradSource(context_, p, *sources_[at]);
}

std::shared_ptr<Route> GroupRoute::Successor() {
  if (!InFlight(exchange_.get())) return shared_from_this();
  return std::make_shared<GroupRoute>(context_, members());
}

}  // namespace poseidon
