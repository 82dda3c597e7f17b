#include "python/model.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/named.h"
#include "core/plan/chooser.h"
#include "core/plan/trials.h"
#include "horovod/traits.h"
#include "python/parse.h"
#include "python/plan.h"

namespace py = pybind11;

namespace poseidon {

namespace {

// A tensor as all ranks together see it, and what a rank's processor takes for it.
struct ModelTensor {
  MergedTensor merged;
  LayerCost cost;
};

DType ParseDType(const std::string& text) {
  DType dtype;
  ThrowIfError(ParseNamed<DType>(
      "dtype", text,
      {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt32, DType::kInt64}, &dtype));
  return dtype;
}

const Codec& ParseCodec(const std::string& text) {
  for (const Codec* codec : {&IdentityCodec(), &HalfCodec()}) {
    if (text == codec->name()) return *codec;
  }
  throw py::value_error("unknown codec \"" + text + "\"; use one of: " + IdentityCodec().name() + ", " +
                        HalfCodec().name());
}

Setting MakeSetting(int ranks, const std::string& codec) {
  if (ranks < 1) throw py::value_error("ranks is " + std::to_string(ranks) + "; it must be at least 1");
  Setting setting;
  setting.size = ranks;
  setting.wire.codec = &ParseCodec(codec);
  setting.wire.traits = HorovodTraits();
  return setting;
}

ModelTensor MakeTensor(const std::string& name, std::vector<int64_t> shape, const std::string& kind, int64_t rows,
                       const std::optional<int64_t>& unique_rows, const std::string& dtype,
                       const std::optional<std::string>& factor_dtype, const std::string& bias, bool sparse,
                       double ready_seconds, int64_t order, const std::vector<double>& cost) {
  if (kind != "linear" && kind != "embedding" && kind != "other") {
    throw py::value_error("unknown kind \"" + kind + "\" of " + name + "; use one of: linear, embedding, other");
  }
  if (cost.size() != 4) {
    throw py::value_error("cost of " + name + " has " + std::to_string(cost.size()) +
                          " numbers; give seconds of local, input, pack, rebuild");
  }
  for (int64_t extent : shape) {
    if (extent < 0) throw py::value_error(name + " has shape " + ShapeText(shape) + "; extents are not negative");
  }
  if (rows < 0 || unique_rows.value_or(0) < 0) throw py::value_error("rows of " + name + " are not negative");
  ModelTensor tensor;
  TensorProfile& base = tensor.merged.base;
  base.name = name;
  base.shape = std::move(shape);
  base.dtype = ParseDType(dtype);
  base.factor_dtype = ParseDType(factor_dtype.value_or(dtype));
  base.is_linear_weight = kind == "linear";
  base.is_embedding = kind == "embedding";
  base.used = true;
  base.bias = bias;
  base.order = order;
  base.ready_seconds = ready_seconds;
  tensor.merged.sparse = sparse;
  tensor.merged.global_rows = rows;
  tensor.merged.global_unique_rows = unique_rows.value_or(rows);
  tensor.merged.sfb_allowed = kind != "other";
  tensor.merged.ready_seconds = ready_seconds;
  tensor.merged.everywhere = true;
  tensor.cost = {cost[0], cost[1], cost[2], cost[3]};
  return tensor;
}

py::dict ToDict(const PricedOffer& offer, const Setting& setting) {
  py::dict dict;
  dict["scheme"] = Name(offer.scheme);
  dict["lossy"] = RuleOf(offer.scheme).lossy();
  dict["obstacle"] = offer.obstacle.empty() ? py::object(py::none()) : py::object(py::str(offer.obstacle));
  if (!offer.obstacle.empty()) return dict;
  const Work& work = offer.work;
  dict["collective"] = work.collective == Collective::kAllreduce ? "allreduce" : "allgather";
  dict["bytes"] = work.bytes;
  dict["sent_bytes"] = SentBytes(work, setting.size);
  dict["memory_bytes"] = work.memory_bytes;
  dict["own_seconds"] = work.own;
  dict["lead_seconds"] = work.lead;
  dict["before_seconds"] = work.before;
  dict["after_seconds"] = work.after;
  return dict;
}

py::list Offers(const ModelTensor& tensor, int ranks, const std::string& codec) {
  const Setting setting = MakeSetting(ranks, codec);
  py::list offers;
  for (const PricedOffer& offer : OffersOf(tensor.merged, tensor.cost, setting)) offers.append(ToDict(offer, setting));
  return offers;
}

Question Ask(const std::vector<ModelTensor>& tensors, const std::optional<std::vector<double>>& network,
             double compute_seconds, double contention, double copy) {
  Question question;
  for (const ModelTensor& tensor : tensors) {
    question.profile.tensors.push_back(tensor.merged);
    question.measured.costs.push_back(tensor.cost);
    question.may_share.push_back(IsFloating(tensor.merged.base.dtype) && !tensor.merged.sparse);
  }
  question.profile.compute_seconds = compute_seconds;
  question.measured.contention = contention;
  question.measured.copy = copy;
  question.measured.network_given = true;
  if (!network) return question;
  if (network->size() != 4) {
    throw py::value_error("network has " + std::to_string(network->size()) +
                          " numbers; give alpha and beta of allreduce, then of allgather");
  }
  question.measured.network.allreduce = {network->at(0), network->at(1)};
  question.measured.network.allgather = {network->at(2), network->at(3)};
  return question;
}

py::object ChoosePlan(const std::vector<ModelTensor>& tensors, int ranks, const std::string& policy,
                      const std::string& dense, const std::optional<std::vector<double>>& network,
                      double compute_seconds, double contention, double copy, const std::vector<std::string>& wishes,
                      const std::string& codec, double memory_limit) {
  ChooserSettings settings;
  settings.policy = Parse(ParsePolicy, policy);
  settings.setting = MakeSetting(ranks, codec);
  for (const std::string& wish : wishes) settings.wishes.push_back(Parse(ParseSchemeOverride, wish));
  ThrowIfError(ParseDense(dense, &settings.dense));
  settings.gather_memory_bytes = memory_limit;
  Trials trials;
  return ToDict(Choose(Ask(tensors, network, compute_seconds, contention, copy), settings, &trials));
}

py::dict Simulate(const std::vector<ModelTensor>& tensors, const std::vector<std::string>& schemes, int ranks,
                  const std::vector<double>& network, double compute_seconds, double contention, double copy,
                  const std::string& codec) {
  const Setting setting = MakeSetting(ranks, codec);
  const Question question = Ask(tensors, network, compute_seconds, contention, copy);
  if (schemes.size() != tensors.size()) {
    throw py::value_error(std::to_string(schemes.size()) + " schemes for " + std::to_string(tensors.size()) +
                          " tensors; give one each");
  }
  const OfferedModel offered =
      MakeStepModel(question.profile, OffersOf(question.profile, question.measured.costs, setting), question.measured,
                    setting.wire.traits.fusion_bytes);
  std::vector<Scheme> chosen;
  for (size_t i = 0; i < schemes.size(); ++i) {
    chosen.push_back(Parse(ParseScheme, schemes[i]));
    if (offered.IndexOf(i, chosen.back()) >= 0) continue;
    const std::string obstacle = RuleOf(chosen.back()).Obstacle(tensors[i].merged, setting);
    throw py::value_error(tensors[i].merged.base.name + " cannot travel by " + schemes[i] + ": " + obstacle);
  }
  return ToDict(SimulateStep(offered.model, offered.ChoiceOf(chosen)));
}

}  // namespace

void BindModel(py::module_& extension) {
  py::module_ m = extension.def_submodule("model", "Bytes, step model and chooser, without ranks, for planners.");
  py::class_<ModelTensor>(m, "Tensor")
      .def(py::init(&MakeTensor), py::arg("name"), py::arg("shape"), py::kw_only(), py::arg("kind") = "other",
           py::arg("rows") = 0, py::arg("unique_rows") = std::nullopt, py::arg("dtype") = "float32",
           py::arg("factor_dtype") = std::nullopt, py::arg("bias") = "", py::arg("sparse") = false,
           py::arg("ready_seconds") = -1.0, py::arg("order") = -1, py::arg("cost") = std::vector<double>{0, 0, 0, 0})
      .def_property_readonly("name", [](const ModelTensor& tensor) { return tensor.merged.base.name; });
  m.def("schemes", [] {
    std::vector<std::string> names;
    for (size_t place = 0; place < SchemeCount(); ++place) names.push_back(Name(Scheme(place)));
    return names;
  });
  m.def("offers", &Offers, py::arg("tensor"), py::kw_only(), py::arg("ranks"), py::arg("codec") = "none");
  m.def("choose", &ChoosePlan, py::arg("tensors"), py::kw_only(), py::arg("ranks"), py::arg("policy") = "time",
        py::arg("dense") = "auto", py::arg("network") = std::nullopt, py::arg("compute_seconds") = 0.0,
        py::arg("contention") = 0.0, py::arg("copy") = 0.0, py::arg("wishes") = std::vector<std::string>{},
        py::arg("codec") = "none", py::arg("memory_limit") = 2e9);
  m.def("simulate", &Simulate, py::arg("tensors"), py::arg("schemes"), py::kw_only(), py::arg("ranks"),
        py::arg("network"), py::arg("compute_seconds") = 0.0, py::arg("contention") = 0.0, py::arg("copy") = 0.0,
        py::arg("codec") = "none");
}

}  // namespace poseidon
