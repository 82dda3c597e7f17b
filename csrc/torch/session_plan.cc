// Session's part in the agreement: what every rank contributes in step 0, the plan that rank 0 makes of it, and what follows from it.
#include <algorithm>
#include <utility>

#include <ATen/Parallel.h>

#include "core/cost_model.h"
#include "core/gather_bytes.h"
#include "torch/dtypes.h"
#include "torch/session.h"
#include "torch/status_error.h"

namespace poseidon {

std::string Session::WireName(const char* kind, const std::string& name) const {
  return "poseidon." + options_.tag + "." + kind + "." + name;
}

// The parameter's gradient is complete in .grad and has not been sent: the guard's moment.
void Session::CheckProfile(Parameter& p) {
  const at::Tensor& grad = p.tensor.grad();
  if (!grad.defined()) return;
  if (p.layer) p.layer->CheckWeight(grad);
  if (p.table) p.table->CheckWeight(grad);
  if (p.tensor.dim() != 1) return;
  for (Parameter& other : parameters_) {
    if (other.layer && other.layer->profiled_bias().is_same(p.tensor)) other.layer->CheckBias(grad);
  }
}

std::string Session::WhyNoLayer(const Parameter& p) const {
  if (p.tensor.dim() != 2) return "it is no matrix";
  if (p.group >= 0) return "it is part of a group";
  if (options_.compression == CompressionKind::kPython) return "the compressor is not one of Horovod's own";
  if (!CanFactor()) return "the reduction is neither an average nor a sum";
  if (!p.tensor.is_contiguous()) return "it is not contiguous";
  return "allreduce was asked for";
}

// The table's part of the entry, after the linear layer's.
void Session::FillTableProfile(const Parameter& p, TensorProfile* tensor) const {
  if (!p.table || !p.table->profiled()) return;
  if (p.layer->profiled()) {  // tied: neither kind of factors gives all of its gradient
    tensor->is_embedding = true;
    tensor->sfb_allowed = false;
    if (tensor->reason.empty()) tensor->reason = "it is an embedding table too";
    return;
  }
  p.table->FillProfile(tensor);
  // Fewer passes than configured: the hook has not looked at the gradient yet.
  if (p.table->profiled_sparse() && !p.counter.sent() && !options_.sparse_as_dense) tensor->sparse = true;
  if (p.table->profiled_sparse() && options_.sparse_as_dense) {
    tensor->sfb_allowed = false;
    tensor->reason = "sparse_as_dense asks for a dense reduction";
  }
}

RankProfile Session::LocalProfile() const {
  RankProfile profile;
  profile.settings_text = options_.settings;
  profile.settings_hash = HashBytes(options_.settings.data(), options_.settings.size());
  for (const Parameter& p : parameters_) {
    TensorProfile tensor;
    tensor.name = p.name;
    tensor.shape = p.tensor.sizes().vec();
    tensor.dtype = ToDType(p.tensor.scalar_type());
    tensor.used = p.counter.touched();
    tensor.sparse = p.sparse_now;
    if (p.layer) {
      p.layer->FillProfile(&tensor);
      const at::Tensor& bias = p.layer->profiled_bias();
      const auto owner = std::find_if(parameters_.begin(), parameters_.end(),
                                      [&](const Parameter& other) { return other.tensor.is_same(bias); });
      tensor.bias = owner != parameters_.end() && bias.defined() ? owner->name : "";
      const bool shared = bias.defined() && std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& other) {
                            return &other != &p && other.layer && other.layer->profiled_bias().is_same(bias);
                          });
      if (bias.defined() && (owner == parameters_.end() || owner->group >= 0 || shared)) {
        tensor.sfb_allowed = false;
        tensor.reason = shared ? "its bias is shared with another layer" : "its bias is reduced elsewhere";
      }
      FillTableProfile(p, &tensor);
    } else {
      tensor.reason = WhyNoLayer(p);
    }
    profile.tensors.push_back(std::move(tensor));
  }
  return profile;
}

Status Session::AgreeOnPlan() {
  std::vector<std::vector<uint8_t>> gathered;
  Status status = GatherBytes(*engine_, WireName("agree", "profile"), options_.process_set, EncodeProfile(LocalProfile()),
                              &gathered);
  if (!status.ok()) return status;
  std::vector<RankProfile> by_rank(gathered.size());
  for (size_t rank = 0; rank < gathered.size(); ++rank) {
    status = DecodeProfile(gathered[rank].data(), gathered[rank].size(), &by_rank[rank]);
    if (!status.ok()) {
      return Status::Internal("the profile of rank " + std::to_string(rank) + " cannot be read (" + status.message() +
                              "); is the same version of poseidon_hvd installed on every host?");
    }
  }
  status = MergeProfiles(by_rank, &merged_profile_);  // the same verdict, and the same error, on every rank
  return status.ok() ? ReceivePlan() : status;
}

Status Session::ReceivePlan() {
  std::vector<uint8_t> mine;
  if (options_.rank == 0) {
    Plan plan;
    plan.size = options_.size;
    plan.reconstruct_threads = at::get_num_threads();
    SelectorSettings settings;
    settings.policy = options_.policy;
    settings.size = options_.size;
    settings.fp16_wire = options_.compression == CompressionKind::kFp16;
    plan.decisions = Select(merged_profile_, options_.overrides, settings);
    mine = EncodePlan(plan);
  }
  std::vector<std::vector<uint8_t>> gathered;
  Status status = GatherBytes(*engine_, WireName("agree", "plan"), options_.process_set, mine, &gathered);
  if (!status.ok()) return status;
  status = DecodePlan(gathered[0].data(), gathered[0].size(), &next_plan_);
  if (!status.ok()) return Status::Internal("the plan of rank 0 cannot be read: " + status.message());

  std::vector<LocalTensor> local;
  for (const Parameter& p : parameters_) local.push_back({p.name, p.tensor.sizes().vec()});
  const uint64_t hash = HashPlan(gathered[0], local);
  std::vector<uint8_t> hash_bytes(sizeof(hash));
  for (size_t i = 0; i < sizeof(hash); ++i) hash_bytes[i] = static_cast<uint8_t>(hash >> (8 * i));
  status = GatherBytes(*engine_, WireName("agree", "hash"), options_.process_set, hash_bytes, &gathered);
  if (!status.ok()) return status;
  for (size_t rank = 1; rank < gathered.size(); ++rank) {
    if (gathered[rank] == gathered[0]) continue;
    return Status::InvalidArgument("Ranks 0 and " + std::to_string(rank) + " hold different communication plans, so they would wait "
                                   "for each other for ever. All ranks must build the same model and wrap the same parameters in "
                                   "the same order.");
  }

  adopt_next_plan_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].sparse = merged_profile_.tensors[i].sparse;
    const TensorDecision& decision = next_plan_.decisions[i];
    if (decision.request_refused) warnings_.push_back(decision.name + ": " + decision.reason + ".");
  }
  if (next_plan_.reconstruct_threads != at::get_num_threads()) {
    warnings_.push_back("this rank computes with " + std::to_string(at::get_num_threads()) + " threads and rank 0 with " +
                        std::to_string(next_plan_.reconstruct_threads) +
                        ": gradients rebuilt from factors may differ in the last bits between them. Set OMP_NUM_THREADS alike.");
  }
  return Status::OK();
}

void Session::AdoptPlan() {
  plan_ = std::move(next_plan_);
  planned_ = true;
  std::vector<int> weights;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Scheme scheme = plan_.decisions[i].scheme;
    KeepLayerOf(parameters_[i], scheme);
    if (IsFactored(scheme)) weights.push_back(static_cast<int>(i));
  }
  for (int weight : weights) StartFactored(weight);
}

// Of the two candidates the one that the plan wants, if any; the other one takes no more calls.
void Session::KeepLayerOf(Parameter& p, Scheme scheme) {
  const std::shared_ptr<FactoredLayer> table = std::exchange(p.table, nullptr);
  for (const std::shared_ptr<FactoredLayer>& candidate : {p.layer, table}) {
    if (!candidate || candidate->scheme() == scheme) continue;
    candidate->set_mode(FactoredLayer::Mode::kBypass);
    UnregisterLayer(*candidate);
  }
  if (scheme == Scheme::kRowSparse) p.layer = table;
}

// A bias has no scheme of its own: it follows its weight.
void Session::DecideBias(const Factored& factored, Scheme scheme) {
  if (factored.bias < 0) return;
  parameters_[factored.bias].layer_weight = scheme == Scheme::kSfb ? factored.weight : -1;
  TensorDecision& decision = plan_.decisions[factored.bias];
  decision.scheme = scheme;
  decision.global_rows = plan_.decisions[factored.weight].global_rows;
  decision.sfb_bytes = scheme == Scheme::kSfb ? 0 : -1;
  decision.reason = "follows " + parameters_[factored.weight].name;
}

void Session::StartFactored(int weight_index) {
  Parameter& weight = parameters_[weight_index];
  const TensorProfile& profile = merged_profile_.tensors[weight_index].base;
  Factored factored;
  factored.weight = weight.layer_weight = weight_index;
  // By name: a rank that did not use the layer in step 0 has not seen its bias.
  for (size_t i = 0; i < parameters_.size() && !profile.bias.empty(); ++i) {
    if (parameters_[i].name == profile.bias) factored.bias = static_cast<int>(i);
  }
  DecideBias(factored, Scheme::kSfb);
  const DType wire = FactorWireDType(profile.factor_dtype, options_.compression == CompressionKind::kFp16);
  FactoredLayer::Settings settings;
  if (factored.bias >= 0) settings.bias = parameters_[factored.bias].tensor;
  settings.wire_type = ToScalarType(wire);
  settings.max_elements = options_.max_gathered_elements / options_.size;
  settings.sparse = weight.sparse;
  weight.layer->StartCapture(settings);
  factored.exchange = NewSfbExchange(factored);
  factored_.push_back(std::move(factored));
}

std::shared_ptr<SfbExchange> Session::NewSfbExchange(const Factored& factored) const {
  const Parameter& weight = parameters_[factored.weight];
  SfbExchange::Options options;
  options.scheme = weight.layer->scheme();
  options.layout = weight.layer->layout();
  options.factor_dtype = ToDType(weight.layer->wire_type());
  options.extra_reduction = options_.reduction;
  options.process_set = options_.process_set;
  options.size = options_.size;
  for (int index : {factored.weight, factored.bias}) {
    if (index < 0) continue;
    const at::Tensor& param = parameters_[index].tensor;
    const DType wire = AllreduceWireDType(ToDType(param.scalar_type()), options_.compression == CompressionKind::kFp16);
    options.dense_bytes += AllreduceWireBytes(param.numel(), wire, options_.size);
  }
  const char* kind = options.scheme == Scheme::kSfb ? "sfb" : "rows";
  return std::make_shared<SfbExchange>(WireName(kind, weight.name), weight.layer, options);
}

// The exchange was abandoned in flight: it keeps the old layer and its buffers, and this session goes on with new ones.
void Session::RenewFactored(Factored& factored) {
  Parameter& weight = parameters_[factored.weight];
  const FactoredLayer::Settings settings = weight.layer->settings();
  if (weight.layer->kind() == FactoredLayer::Kind::kEmbedding) {
    weight.layer = NewTable(weight);
  } else {
    weight.layer = NewLayer(weight);
  }
  weight.layer->StartCapture(settings);
  RegisterLayer(weight.layer, weak_from_this());
  factored.exchange = NewSfbExchange(factored);
}

void Session::StopFactored(int weight_index, const std::string& reason) {
  Parameter& weight = parameters_[weight_index];
  weight.layer->set_mode(FactoredLayer::Mode::kBypass);
  UnregisterLayer(*weight.layer);
  TensorDecision& decision = plan_.decisions[weight_index];
  decision.scheme = weight.sparse ? Scheme::kSparseAllgather : Scheme::kAllreduce;
  decision.reason = reason;
  warnings_.push_back(weight.name + ": " + reason + ". It uses " + (weight.sparse ? "Horovod's sparse allgather" : "allreduce") +
                      " from now on, on all ranks.");
  const auto it = std::find_if(factored_.begin(), factored_.end(), [&](const Factored& f) { return f.weight == weight_index; });
  weight.layer_weight = -1;
  DecideBias(*it, Scheme::kAllreduce);
  factored_.erase(it);
}

}  // namespace poseidon
