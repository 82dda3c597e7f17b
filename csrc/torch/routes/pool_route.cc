#include "torch/routes/pool_route.h"

#include <algorithm>
#include <string>
#include <utility>

#include "torch/status_error.h"

namespace poseidon {

PoolRoute::PoolRoute(RouteContext& context, std::vector<Parameter*> members, int number)
    : Route(context, std::move(members)), number_(number) {}

// The model may have been converted since.
GradPool& PoolRoute::Pool() {
  const Parameter& first = *members().front();
  const at::ScalarType type = context_.DenseWireType(first);
  if (pool_ && (pool_->wire_type() == type || !pool_->empty())) return *pool_;
  std::vector<std::string> names;
  std::vector<at::Tensor> params;
  for (const Parameter* p : members()) {
    names.push_back(p->name);
    params.push_back(p->tensor);
  }
  const std::string others = "+" + std::to_string(members().size() - 1);
  pool_ = std::make_shared<GradPool>(first.name + others, names, params, type);
  const std::string name = context_.WireName("slice", first.name + others);
  exchange_ = std::make_shared<DenseExchange>(name, std::vector<DenseExchange::Member>{{name, pool_}},
                                              context_.ReductionOfMessage(first, number_), context_.options.process_set,
                                              context_.options.size);
  return *pool_;
}

size_t PoolRoute::SlotOf(const Parameter& member) const {
  return static_cast<size_t>(std::find(members().begin(), members().end(), &member) - members().begin());
}

void PoolRoute::OnComplete(Parameter& member, bool fresh) {
  ThrowIfError(Pool().Fill(SlotOf(member), /*visible=*/true, fresh));
  if (pool_->full()) Send();
}

void PoolRoute::Flush(Parameter&) {
  GradPool& pool = Pool();
  for (size_t slot = 0; slot < members().size(); ++slot) {
    if (!pool.filled(slot)) ThrowIfError(pool.Fill(slot, /*visible=*/members()[slot]->active));
  }
  Send();
}

void PoolRoute::Send() {
  context_.Submit(exchange_, members());
  for (Parameter* p : members()) p->counter.MarkSent();
}

// All members at once.
Status PoolRoute::Finish(Parameter& member) {
  if (&member != members().front()) return Status::OK();
  context_.CountMessage(*pool_, pool_->bytes());
  return pool_->FinishOnTrainingThread();
}

void PoolRoute::EndStep() {
  if (pool_) pool_->DropStep();
}

std::shared_ptr<Route> PoolRoute::Successor() {
  if (!InFlight(exchange_.get())) return shared_from_this();
  return std::make_shared<PoolRoute>(context_, members(), number_);
}

double PoolRoute::CopiedBytes(const Parameter& member) const {
  if (!pool_ || pool_->copied_bytes() == 0) return 0;
  return static_cast<double>(member.tensor.numel() *
                             static_cast<int64_t>(c10::elementSize(context_.DenseWireType(member))));
}

}  // namespace poseidon
