#include "core/plan/selector.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <unordered_map>
#include <utility>

#include "core/model/cost_model.h"
#include "core/schemes/factor_layout.h"

namespace poseidon {
namespace {

// Why SFB cannot carry this tensor; empty if it can.
std::string Obstacle(const MergedTensor& tensor) {
  const TensorProfile& base = tensor.base;
  if (!base.is_linear_weight)
    return base.shape.size() == 2 && !tensor.reason.empty() ? tensor.reason : "not a linear weight";
  if (!tensor.sfb_allowed) return tensor.reason;
  if (base.shape.size() != 2 || NumElements(base.shape) == 0) return "weight of shape " + ShapeText(base.shape);
  if (!IsFloating(base.factor_dtype)) return std::string("factors are ") + Name(base.factor_dtype);
  const FactorLayout layout{base.shape[1], base.shape[0]};
  if (Status status = CheckElementCount(tensor.global_rows, layout, base.name); !status.ok()) return status.message();
  return {};
}

// ---- Embedding tables

// Why the rows of this table cannot be gathered; empty if they can.
std::string RowSparseObstacle(const MergedTensor& tensor, const SelectorSettings& settings) {
  const TensorProfile& base = tensor.base;
  if (!tensor.sfb_allowed) return tensor.reason;
  if (base.shape.size() != 2 || NumElements(base.shape) == 0) return "table of shape " + ShapeText(base.shape);
  if (!IsFloating(base.factor_dtype)) return std::string("output gradients are ") + Name(base.factor_dtype);
  const FactorLayout layout{IdElements(FactorWireDType(base.factor_dtype, settings.fp16_wire)), base.shape[1]};
  if (Status status = CheckElementCount(tensor.global_unique_rows, layout, base.name); !status.ok())
    return status.message();
  return {};
}

void ChooseRowsByBytes(const MergedTensor& tensor, const SelectorSettings& settings, TensorDecision* decision) {
  if (tensor.global_rows == 0) {
    decision->reason = "no rows in the profiling step";
    return;
  }
  const TensorProfile& base = tensor.base;
  const double otherwise = tensor.sparse
                               ? SparseAllgatherWireBytes(tensor.global_rows, base.shape[1], base.dtype, settings.size)
                               : decision->allreduce_bytes;
  const DType wire = FactorWireDType(base.factor_dtype, settings.fp16_wire);
  const double row_bytes = RowSparseWireBytes(1, base.shape[1], wire, settings.size);
  if (decision->row_sparse_bytes <= otherwise) decision->scheme = Scheme::kRowSparse;
  decision->reason = "bytes: " + std::to_string(tensor.global_unique_rows) +
                     " merged global rows, row-sparse sends fewer up to " +
                     std::to_string(static_cast<int64_t>(std::floor(otherwise / row_bytes)));
}

// `decision` has name, rows and allreduce_bytes.
void DecideEmbedding(const MergedTensor& tensor, SchemeOverride value, const SelectorSettings& settings,
                     TensorDecision* decision) {
  decision->scheme = tensor.sparse ? Scheme::kSparseAllgather : Scheme::kAllreduce;
  const std::string obstacle = RowSparseObstacle(tensor, settings);
  if (obstacle.empty()) {
    decision->row_sparse_bytes =
        RowSparseWireBytes(tensor.global_unique_rows, tensor.base.shape[1],
                           FactorWireDType(tensor.base.factor_dtype, settings.fp16_wire), settings.size);
  }
  if (settings.size <= 1) {
    decision->reason = "one rank";
  } else if (value == SchemeOverride::kSfb || (value == SchemeOverride::kRowSparse && !obstacle.empty())) {
    decision->request_refused = true;
    decision->reason =
        std::string("override: ") + Name(value) + " was asked for but cannot be: " +
        (value == SchemeOverride::kSfb ? "it is an embedding table, for which there is row-sparse" : obstacle);
  } else if (value == SchemeOverride::kAllreduce) {
    decision->request_refused = tensor.sparse;
    decision->reason = tensor.sparse ? "allreduce was asked for but the gradient is sparse" : "override: allreduce";
  } else if (value == SchemeOverride::kRowSparse) {
    decision->scheme = Scheme::kRowSparse;
    decision->reason = "override: row-sparse";
  } else if (settings.policy == Policy::kAllreduce) {
    decision->reason = tensor.sparse ? "sparse gradient" : "policy: allreduce";
  } else if (!obstacle.empty()) {
    decision->reason = obstacle;  // "wherever it is possible" of policy kSfb: nothing to warn of
  } else if (settings.policy == Policy::kSfb) {
    decision->scheme = Scheme::kRowSparse;
    decision->reason = "policy: sfb";
  } else {
    ChooseRowsByBytes(tensor, settings, decision);
  }
}

// Row-sparse was asked for what is no embedding table. A pattern that means tables may match a bias: nothing to warn
// of.
void RefuseRowSparse(const MergedTensor& tensor, TensorDecision* decision) {
  decision->request_refused = tensor.base.shape.size() > 1;
  const std::string why = tensor.base.is_embedding ? "the table is the weight of linear calls too"
                          : tensor.base.used       ? "not an embedding table"
                                                   : tensor.reason;
  decision->reason = "override: row-sparse was asked for but cannot be: " + why;
}

// ---- Everything else

// Policy and override say the same thing once it is known which of them counts.
Policy Wanted(SchemeOverride value, Policy policy) {
  if (value == SchemeOverride::kAllreduce) return Policy::kAllreduce;
  if (value == SchemeOverride::kSfb) return Policy::kSfb;
  return policy;
}

void ChooseByBytes(const MergedTensor& tensor, const SelectorSettings& settings, TensorDecision* decision) {
  if (tensor.global_rows == 0) {
    decision->reason = "no rows in the profiling step";
    return;
  }
  const TensorProfile& base = tensor.base;
  const double break_even =
      SfbBreakEvenRows(base.shape[0], base.shape[1], SizeOf(FactorWireDType(base.factor_dtype, settings.fp16_wire)),
                       SizeOf(AllreduceWireDType(base.dtype, settings.fp16_wire)));
  const bool sfb = decision->sfb_bytes <= decision->allreduce_bytes;
  decision->scheme = sfb ? Scheme::kSfb : Scheme::kAllreduce;
  decision->reason = "bytes: " + std::to_string(tensor.global_rows) + " global rows, SFB sends fewer up to " +
                     std::to_string(static_cast<int64_t>(std::floor(break_even)));
}

TensorDecision Decide(const MergedTensor& tensor, SchemeOverride value, const SelectorSettings& settings) {
  const TensorProfile& base = tensor.base;
  TensorDecision decision;
  decision.name = base.name;
  decision.global_rows = tensor.global_rows;
  decision.allreduce_bytes =
      AllreduceWireBytes(NumElements(base.shape), AllreduceWireDType(base.dtype, settings.fp16_wire), settings.size);

  if (base.is_embedding && !base.is_linear_weight) {
    DecideEmbedding(tensor, value, settings, &decision);
    return decision;
  }
  if (tensor.sparse) {
    decision.scheme = Scheme::kSparseAllgather;
    decision.request_refused = value != SchemeOverride::kAuto;
    decision.reason = decision.request_refused ? std::string(Name(value)) + " was asked for but the gradient is sparse"
                                               : "sparse gradient";
    return decision;
  }
  const std::string obstacle = Obstacle(tensor);
  if (obstacle.empty()) {
    decision.sfb_bytes = SfbWireBytes(base.shape[0], base.shape[1], tensor.global_rows,
                                      FactorWireDType(base.factor_dtype, settings.fp16_wire), settings.size);
  }
  if (settings.size <= 1) {
    decision.reason = "one rank";
    return decision;
  }
  if (value == SchemeOverride::kRowSparse) {
    RefuseRowSparse(tensor, &decision);
    return decision;
  }
  const Policy wanted = Wanted(value, settings.policy);
  const char* asked_by = value == SchemeOverride::kAuto ? "policy" : "override";
  if (wanted == Policy::kAllreduce) {
    decision.reason = std::string(asked_by) + ": allreduce";
  } else if (!obstacle.empty()) {
    // Policy kSfb means "wherever it is possible": that a convolution is not a linear weight is nothing to warn of. Nor
    // is a bias that a pattern happens to match: it follows its weight.
    decision.request_refused =
        wanted == Policy::kSfb && (base.is_linear_weight || (value == SchemeOverride::kSfb && base.shape.size() > 1));
    decision.reason =
        decision.request_refused ? std::string(asked_by) + ": sfb was asked for but cannot be: " + obstacle : obstacle;
  } else if (wanted == Policy::kSfb) {
    decision.scheme = Scheme::kSfb;
    decision.reason = std::string(asked_by) + ": sfb";
  } else {
    ChooseByBytes(tensor, settings, &decision);
  }
  return decision;
}

std::string MillisecondsText(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g ms", seconds * 1e3);
  return text;
}

void DecideByTime(const MergedProfile& profile, const std::vector<SchemeOverride>& overrides,
                  const SelectorSettings& settings, const TimeInputs& inputs, std::vector<TensorDecision>* decisions,
                  StepPrediction* prediction) {
  StepModel model = MakeStepModel(profile, *decisions, settings, inputs);
  NetworkLoad load = inputs.load;
  if (inputs.current.size() == decisions->size() && profile.step_seconds > 0) {
    load = LoadOf(model, inputs.current, profile.step_seconds, load);
  }
  model = UnderLoad(model, load);
  std::vector<Scheme> alternative(decisions->size(), Scheme::kAllreduce);
  std::vector<bool> forced(decisions->size(), false);
  for (size_t i = 0; i < decisions->size(); ++i) {
    TensorDecision& decision = (*decisions)[i];
    const StepTensor& tensor = model.tensors[i];
    const SchemeOverride value = i < overrides.size() ? overrides[i] : SchemeOverride::kAuto;
    decision.allreduce_seconds = model.allreduce.Seconds(tensor.allreduce_bytes) + tensor.cost.local;
    if (decision.sfb_bytes >= 0 || decision.row_sparse_bytes >= 0) {
      decision.gather_seconds = model.allgather.Seconds(tensor.gather_bytes) + tensor.cost.pack + tensor.cost.rebuild;
    }
    if (profile.tensors[i].sparse) {  // never a dense gradient; how its rows are gathered has been decided by bytes
      decision.allreduce_seconds = -1;
      alternative[i] = decision.scheme;
      forced[i] = true;
      continue;
    }
    if (decision.gather_seconds < 0) continue;
    const Scheme gathered = decision.row_sparse_bytes >= 0 ? Scheme::kRowSparse : Scheme::kSfb;
    const bool by_time = settings.policy == Policy::kTime && value == SchemeOverride::kAuto;
    forced[i] = decision.scheme == gathered && !by_time;
    if (forced[i] || (by_time && decision.global_rows > 0)) alternative[i] = gathered;
  }
  // A bias follows its layer's weight and has no choice of its own; as a tensor of its own it is allreduced here.
  std::vector<Scheme> current = inputs.current;
  std::vector<TriedChoice> tried = inputs.tried;
  const auto free_biases = [&](std::vector<Scheme>* schemes) {
    for (size_t i = 0; i < std::min(schemes->size(), alternative.size()); ++i) {
      if (alternative[i] == Scheme::kAllreduce) (*schemes)[i] = Scheme::kAllreduce;
    }
  };
  free_biases(&current);
  for (TriedChoice& each : tried) free_biases(&each.schemes);
  const TimeChoice choice = ChooseByTime(
      model, alternative, forced, inputs.settings, current, tried,
      profile.first_step_seconds > 0 ? profile.first_step_seconds : std::numeric_limits<double>::infinity());
  for (size_t i = 0; i < decisions->size(); ++i) {
    if (forced[i] || alternative[i] == Scheme::kAllreduce) continue;
    TensorDecision& decision = (*decisions)[i];
    decision.scheme = choice.schemes[i];
    const bool factored = decision.scheme != Scheme::kAllreduce;
    const std::string alone =
        MillisecondsText(decision.gather_seconds) + " against " + MillisecondsText(decision.allreduce_seconds);
    if (choice.over_memory[i]) {
      decision.reason = "time: its gathered rows exceed the memory limit";
    } else if (factored == (decision.gather_seconds < decision.allreduce_seconds)) {
      decision.reason = "time: " + alone;
    } else {
      decision.reason =
          "time: " + alone + " alone, " + (factored ? "but it shortens the step" : "but hidden or too small a gain");
    }
  }
  if (prediction == nullptr) return;
  *prediction = {true, choice.chosen, choice.dense, load, choice.chosen.step};
  // What the model does not explain of a step that was observed: ranks that wait for each other, above all. Of a choice
  // that was not tried nothing better is known than that of the one in force.
  const auto unexplained = [&](const std::vector<Scheme>& schemes) {
    const auto it =
        std::find_if(tried.begin(), tried.end(), [&](const TriedChoice& each) { return each.schemes == schemes; });
    return it == tried.end() ? -1 : std::max(0.0, it->seconds - SimulateStep(model, schemes).step);
  };
  const double of_current = std::max(0.0, unexplained(current));
  const double of_chosen = unexplained(choice.schemes), of_dense = unexplained(choice.dense_schemes);
  prediction->chosen.step += of_chosen < 0 ? of_current : of_chosen;
  prediction->dense.step += of_dense < 0 ? of_current : of_dense;
}

}  // namespace

StepModel MakeStepModel(const MergedProfile& profile, const std::vector<TensorDecision>& decisions,
                        const SelectorSettings& settings, const TimeInputs& inputs) {
  // The formulas count what one rank sends; the fitted lines count whole tensors and all that is gathered.
  const double share = static_cast<double>(std::max(2, settings.size) - 1) / std::max(2, settings.size);
  StepModel model;
  model.allreduce = inputs.network.allreduce;
  model.allgather = inputs.network.allgather;
  model.compute = profile.compute_seconds;
  model.contention = inputs.contention;
  model.copy = inputs.copy;
  for (size_t i = 0; i < decisions.size(); ++i) {
    const MergedTensor& merged = profile.tensors[i];
    StepTensor tensor;
    tensor.ready = merged.ready_seconds;
    tensor.allreduce_bytes = decisions[i].allreduce_bytes / share / 2;
    tensor.gather_bytes = std::max({0.0, decisions[i].sfb_bytes, decisions[i].row_sparse_bytes}) / share;
    tensor.allreduce_kind = static_cast<uint8_t>(AllreduceWireDType(merged.base.dtype, settings.fp16_wire));
    tensor.gather_kind = static_cast<uint8_t>(FactorWireDType(merged.base.factor_dtype, settings.fp16_wire));
    if (i < inputs.costs.size()) tensor.cost = inputs.costs[i];
    model.tensors.push_back(tensor);
  }
  std::unordered_map<std::string, size_t> by_name;
  for (size_t i = 0; i < decisions.size(); ++i) by_name[decisions[i].name] = i;
  for (size_t i = 0; i < decisions.size(); ++i) {
    if (decisions[i].sfb_bytes < 0) continue;
    const auto bias = by_name.find(profile.tensors[i].base.bias);
    if (bias != by_name.end()) model.tensors[bias->second].carrier = static_cast<int>(i);
  }
  if (!inputs.slices.empty()) ApplyLayout(inputs.slices, &model);
  return Bounded(std::move(model));
}

void ApplyLayout(const std::vector<DenseSlice>& slices, StepModel* model) {
  model->sliced = true;
  for (StepTensor& tensor : model->tensors) {
    tensor.slice = -1;
    tensor.copied = false;
  }
  for (size_t s = 0; s < slices.size(); ++s) {
    if (slices[s].parts > 1) continue;  // parts follow each other without a gap, as one message would
    for (int index : slices[s].tensors) {
      model->tensors[index].slice = static_cast<int>(s);
      model->tensors[index].copied = slices[s].tensors.size() > 1;
    }
  }
}

std::vector<TensorDecision> Select(const MergedProfile& profile, const std::vector<SchemeOverride>& overrides,
                                   const SelectorSettings& settings, const TimeInputs* inputs,
                                   StepPrediction* prediction) {
  std::vector<TensorDecision> decisions;
  decisions.reserve(profile.tensors.size());
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    const SchemeOverride value = i < overrides.size() ? overrides[i] : SchemeOverride::kAuto;
    decisions.push_back(Decide(profile.tensors[i], value, settings));
  }
  if (inputs != nullptr && settings.size > 1) {
    DecideByTime(profile, overrides, settings, *inputs, &decisions, prediction);
  }
  return decisions;
}

}  // namespace poseidon
