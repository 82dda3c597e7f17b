#include "torch/routes/context.h"

#include <algorithm>
#include <utility>

#include "torch/dtypes.h"
#include "torch/parameter.h"
#include "torch/progress.h"
#include "torch/routes/grad_place.h"
#include "torch/status_error.h"
#include "torch/step_clock.h"

namespace poseidon {

namespace {

// Of KeepApart, for gradients that travel alone; messages of the layout are numbered from 0.
constexpr int kFirstNumberAlone = 1 << 16;

}  // namespace

RouteContext::RouteContext(Mutex& its_mutex, std::shared_ptr<Engine> its_engine, const SessionOptions& its_options)
    : mutex(its_mutex),
      engine(std::move(its_engine)),
      options(its_options),
      wire_format{options.compression == CompressionKind::kFp16 ? &HalfCodec() : &IdentityCodec(),
                  engine->transport().traits()} {}

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

Status RouteContext::WaitFor(const std::vector<std::shared_ptr<Exchange>>& exchanges) {
  Unlocked unlocked(mutex);
  return engine->Wait(exchanges);
}

Status RouteContext::Collect(const std::function<bool(const Parameter&)>& chosen) {
  std::vector<std::shared_ptr<Exchange>> waited;
  for (const Sent& each : in_flight) {
    const bool all =
        std::all_of(each.members.begin(), each.members.end(), [&](const Parameter* p) { return chosen(*p); });
    if (all) waited.push_back(each.exchange);
  }
  std::vector<double> waited_seconds(stats.by_scheme.size());
  const Clock::time_point begin = Clock::now();
  Status status;
  {
    Unlocked unlocked(mutex);
    status = engine->Wait(waited, waited_seconds.data());
  }
  stats.synchronize_seconds += SecondsBetween(begin, Clock::now());
  for (size_t i = 0; i < stats.by_scheme.size(); ++i) stats.by_scheme[i].waited_seconds += waited_seconds[i];
  if (!status.ok()) return status;
  const auto has_come = [&](const Sent& each) {
    return std::find(waited.begin(), waited.end(), each.exchange) != waited.end();
  };
  for (const Sent& each : in_flight) {
    if (!has_come(each)) continue;
    const Exchange& exchange = *each.exchange;
    stats.of(exchange.scheme()).Add(exchange.times(), exchange.wire(), exchange.gradients());
    clock->NoteDone(exchange.times());
  }
  in_flight.erase(std::remove_if(in_flight.begin(), in_flight.end(), has_come), in_flight.end());
  return status;
}

at::Tensor RouteContext::Decompress(const Parameter& p, const at::Tensor& received) const {
  Unlocked unlocked(mutex);
  return options.decompress(p.index, received);
}

void RouteContext::NoteReady(const std::vector<Parameter*>& members) {
  for (Parameter* p : members) progress->Note(*p, clock->SinceBegan());
}

at::ScalarType RouteContext::DenseWireType(const Parameter& p) const {
  return ToScalarType(wire_format.Reduced(ToDType(GradType(p.tensor))));
}

Reduction RouteContext::ReductionOfOne(const Parameter& p) const {
  return ReductionOfMessage(p, kFirstNumberAlone + p.index);
}

Reduction RouteContext::ReductionOfMessage(const Parameter& first, int number) const {
  if (options.dense.method == DenseMethod::kFused || options.compression == CompressionKind::kPython)
    return options.reduction;
  return engine->transport().KeepApart(options.reduction, ToDType(DenseWireType(first)), number);
}

void RouteContext::CountMessage(const DenseSource& source, int64_t bytes, int64_t messages) {
  stats.dense_messages += messages;
  stats.dense_copied_bytes += source.copied_bytes();
  stats.dense_in_place_bytes += bytes - source.copied_bytes();
}

}  // namespace poseidon
