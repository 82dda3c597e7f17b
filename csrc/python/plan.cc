#include "python/plan.h"

#include "core/schemes/registry.h"

namespace py = pybind11;

namespace poseidon {

namespace {

py::object Known(double value) { return value < 0 ? py::object(py::none()) : py::object(py::float_(value)); }

py::dict ToDict(const TensorDecision& decision) {
  py::dict dict;
  dict["name"] = decision.name;
  dict["scheme"] = Name(decision.scheme);
  const bool factors = decision.OfferOf(Scheme::kSfb) != nullptr;
  dict["allreduce_bytes"] = decision.bytes(Scheme::kAllreduce);
  dict["sfb_bytes"] = Known(decision.bytes(Scheme::kSfb));
  dict["row_sparse_bytes"] = Known(decision.bytes(Scheme::kRowSparse));
  dict["allreduce_seconds"] = Known(decision.seconds(Scheme::kAllreduce));
  dict["gather_seconds"] = Known(decision.seconds(factors ? Scheme::kSfb : Scheme::kRowSparse));
  dict["global_rows"] = decision.global_rows;
  dict["reason"] = decision.reason;
  return dict;
}

py::dict ToDict(const AlphaBeta& model) {
  py::dict dict;
  dict["alpha_seconds"] = model.alpha;
  dict["beta_seconds_per_byte"] = model.beta;
  return dict;
}

}  // namespace

py::dict ToDict(const StepEstimate& estimate) {
  py::dict dict;
  dict["step_seconds"] = estimate.step;
  dict["exposed_seconds"] = estimate.exposed();
  dict["network_busy_seconds"] = estimate.channel;
  dict["rebuild_seconds"] = estimate.rebuild;
  return dict;
}

py::object ToDict(const Plan& plan) {
  if (plan.decisions.empty()) return py::none();
  py::list tensors;
  for (const TensorDecision& decision : plan.decisions) tensors.append(ToDict(decision));
  py::dict dict;
  dict["size"] = plan.size;
  dict["made_at_step"] = plan.made_at_step;
  dict["tensors"] = tensors;
  dict["network"] = py::none();
  if (plan.network.known()) {
    py::dict network;
    network["allreduce"] = ToDict(plan.network.allreduce);
    network["allgather"] = ToDict(plan.network.allgather);
    network["skew_seconds"] = plan.network.skew_seconds;
    network["clamped"] = plan.network.clamped;
    dict["network"] = network;
  }
  py::dict load;
  load["allreduce"] = plan.prediction.load.allreduce;
  load["allgather"] = plan.prediction.load.allgather;
  dict["network_load"] = load;
  py::list slices;
  for (const DenseSlice& slice : plan.slices) {
    py::list names;
    for (int tensor : slice.tensors) names.append(plan.decisions[tensor].name);
    slices.append(names);
  }
  py::dict dense;
  dense["method"] = Name(plan.dense_method);
  dense["slices"] = slices;
  dict["dense"] = dense;
  dict["predicted"] = plan.prediction.known ? py::object(ToDict(plan.prediction.chosen)) : py::none();
  dict["predicted_dense"] = plan.prediction.known ? py::object(ToDict(plan.prediction.dense)) : py::none();
  return dict;
}

py::dict ToDict(const SessionStats& stats) {
  py::dict schemes;
  for (size_t place = 0; place < stats.by_scheme.size(); ++place) {
    const Scheme scheme(place);
    if (!RuleOf(scheme).can_be_asked_for()) continue;  // the transport's own
    const SchemeStats& s = stats.of(scheme);
    py::dict dict;
    dict["tensors"] = s.tensors;
    dict["collectives"] = s.collectives;
    dict["wire_bytes"] = s.bytes_sent;
    dict["horovod_wire_bytes"] = s.dense_bytes;
    dict["waited_seconds"] = s.waited_seconds;
    dict["pack_seconds"] = s.pack_seconds;
    dict["queue_seconds"] = s.queue_seconds;
    dict["wire_seconds"] = s.wire_seconds;
    dict["handoff_seconds"] = s.handoff_seconds;
    dict["rebuild_seconds"] = s.rebuild_seconds;
    schemes[Name(scheme)] = dict;
  }
  py::dict dict;
  dict["steps"] = stats.steps;
  dict["synchronize_seconds"] = stats.synchronize_seconds;
  dict["early_messages"] = stats.early_messages;
  py::dict dense;
  dense["slices"] = stats.dense_messages;
  dense["in_place_bytes"] = stats.dense_in_place_bytes;
  dense["copied_bytes"] = stats.dense_copied_bytes;
  dict["dense"] = dense;
  dict["schemes"] = schemes;
  return dict;
}

}  // namespace poseidon
