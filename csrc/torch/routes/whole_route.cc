#include "torch/routes/whole_route.h"

#include <utility>

namespace poseidon {

namespace {

thread_local bool in_compressor = false;

struct CompressorRuns {
  CompressorRuns() { in_compressor = true; }
  ~CompressorRuns() { in_compressor = false; }
};

}  // namespace

bool InCompressor() { return in_compressor; }

std::shared_ptr<GradSource> NewGradSource(const RouteContext& context, const Parameter& p) {
  return std::make_shared<GradSource>(p.name, p.tensor, context.options.compression, context.wire_format,
                                      [compress = context.options.compress, index = p.index](const at::Tensor& grad) {
                                        const CompressorRuns runs;
                                        return compress(index, grad);
                                      });
}

Status FinishGradSource(const RouteContext& context, const Parameter& p, GradSource& source) {
  const Status status = source.FinishOnTrainingThread();
  const at::Tensor received = source.TakeCompressed();
  if (status.ok() && received.defined()) {
    at::NoGradGuard no_grad;
    p.tensor.mutable_grad().copy_(context.Decompress(p, received));
  }
  return status;
}

WholeRoute::WholeRoute(RouteContext& context, Parameter& parameter, bool planned)
    : Route(context, {&parameter}), planned_(planned), source_(NewGradSource(context, parameter)) {}

void WholeRoute::Send() {
  Parameter& p = parameter();
  const bool left_in_flight = InFlight(exchange_.get());
  const at::ScalarType type = context_.DenseWireType(p);  // the model may have been converted since
  if (!exchange_ || left_in_flight || type_ != type) {
    if (left_in_flight) source_ = NewGradSource(context_, p);  // its buffers stay the exchange's
    type_ = type;
    const std::string name = context_.WireName("allreduce", p.name);
    exchange_ = std::make_shared<DenseExchange>(name, std::vector<DenseExchange::Member>{{name, source_}},
                                                context_.ReductionOfOne(p), context_.options.process_set,
                                                context_.options.size);
  }
  context_.Submit(exchange_, {&p});
  p.counter.MarkSent();
}

void WholeRoute::OnComplete(Parameter&, bool) { Send(); }

void WholeRoute::Flush(Parameter&) { Send(); }

Status WholeRoute::Finish(Parameter& p) {
  if (planned_) {
    context_.CountMessage(*source_, p.tensor.numel() * static_cast<int64_t>(c10::elementSize(type_)));
  }
  return FinishGradSource(context_, p, *source_);
}

// Send() looks whether the exchange is in flight, also for the routes that own one of these.
std::shared_ptr<Route> WholeRoute::Successor() { return shared_from_this(); }

}  // namespace poseidon
