#include "torch/routes/context.h"

#include <utility>

#include "core/model/cost_model.h"
#include "torch/dtypes.h"
#include "torch/parameter.h"
#include "torch/progress.h"
#include "torch/routes/grad_place.h"
#include "torch/status_error.h"
#include "torch/step_clock.h"

namespace poseidon {

namespace {

// Of KeptFromFusion, for gradients that travel alone; messages of the layout are numbered from 0.
constexpr int kFirstNumberAlone = 1 << 16;

}  // namespace

std::string RouteContext::WireName(const char* kind, const std::string& name) const {
  return "poseidon." + options.tag + "." + kind + "." + name;
}

void RouteContext::ThrowIfFailed(const Status& status) const {
  if (status.ok()) return;
  std::string message = "[rank " + std::to_string(options.rank) + "] " + status.message();
  const bool peer_may_have_gone = status.code() == StatusCode::kUnavailable || status.code() == StatusCode::kAborted;
  if (peer_may_have_gone && gathers) {
    message +=
        " (If a rank has called hvd.join() while others still train: Horovod's join covers no allgather. Give "
        "DistributedOptimizer uneven_steps=True, or set POSEIDON_UNEVEN_STEPS=1.)";
  }
  Throw(Status(status.code(), message));
}

void RouteContext::Submit(const std::shared_ptr<Exchange>& exchange, std::vector<Parameter*> members) {
  ThrowIfFailed(engine->Submit(exchange));
  in_flight.push_back({exchange, std::move(members)});
}

void RouteContext::Admit(const std::shared_ptr<Exchange>& exchange, std::vector<Parameter*> members) {
  ThrowIfFailed(engine->Admit(exchange));
  in_flight.push_back({exchange, std::move(members)});
}

void RouteContext::NoteReady(const std::vector<Parameter*>& members) {
  for (Parameter* p : members) progress->Note(*p, clock->SinceBegan());
}

at::ScalarType RouteContext::DenseWireType(const Parameter& p) const {
  return ToScalarType(AllreduceWireDType(ToDType(GradType(p.tensor)), options.factors_half()));
}

Reduction RouteContext::ReductionOfOne(const Parameter& p) const {
  return ReductionOfMessage(p, kFirstNumberAlone + p.index);
}

Reduction RouteContext::ReductionOfMessage(const Parameter& first, int number) const {
  if (options.dense.method == DenseMethod::kHorovod || options.compression == CompressionKind::kPython)
    return options.reduction;
  return KeptFromFusion(options.reduction, ToDType(DenseWireType(first)), number);
}

void RouteContext::CountMessage(const DenseSource& source, int64_t bytes, int64_t messages) {
  stats.dense_messages += messages;
  stats.dense_copied_bytes += source.copied_bytes();
  stats.dense_in_place_bytes += bytes - source.copied_bytes();
}

}  // namespace poseidon
