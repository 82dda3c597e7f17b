#include "python/session.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/parse.h"
#include "python/plan.h"
#include "torch/session.h"
#include "torch/status_error.h"

namespace py = pybind11;

namespace poseidon {

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Python code, called from autograd's threads and destroyed by whichever thread drops the session.
std::shared_ptr<py::object> Share(py::handle function) {
  return std::shared_ptr<py::object>(new py::object(py::reinterpret_borrow<py::object>(function)),
                                     [](py::object* object) {
                                       py::gil_scoped_acquire gil;
                                       delete object;
                                     });
}

std::function<at::Tensor(int, const at::Tensor&)> WrapCompressor(py::handle compress) {
  if (compress.is_none()) return nullptr;
  return [function = Share(compress)](int index, const at::Tensor& tensor) {
    py::gil_scoped_acquire gil;
    return (*function)(index, tensor).cast<at::Tensor>();
  };
}

std::function<void(int, const at::Tensor&)> WrapHook(py::handle hook) {
  if (hook.is_none()) return nullptr;
  return [function = Share(hook)](int index, const at::Tensor& grad) {
    py::gil_scoped_acquire gil;
    (*function)(index, grad);
  };
}

std::function<void()> WrapReduce(py::handle reduce) {
  if (reduce.is_none()) return nullptr;
  return [function = Share(reduce)] {
    py::gil_scoped_acquire gil;
    (*function)();
  };
}

// An option's reader: Python's value -> its place in SessionOptions.
using Reader = void (*)(py::handle value, SessionOptions* options);

template <auto kMember>
void Into(py::handle value, SessionOptions* options) {
  auto& place = options->*kMember;
  place = value.cast<std::decay_t<decltype(place)>>();
}

void ReadCompression(py::handle value, SessionOptions* options) {
  const auto kind = value.cast<std::string>();
  options->compression = kind == "none"   ? CompressionKind::kNone
                         : kind == "fp16" ? CompressionKind::kFp16
                                          : CompressionKind::kPython;
}

void ReadSchemes(py::handle value, SessionOptions* options) {
  for (const auto& text : value.cast<std::vector<std::string>>()) {
    options->overrides.push_back(Parse(ParseSchemeOverride, text));
  }
}

void ReadMaxGatheredElements(py::handle value, SessionOptions* options) {
  if (!value.is_none()) options->max_gathered_elements = value.cast<int64_t>();
}

// Seconds and seconds per byte of allreduce, then of allgather; None: not known.
void ReadNetwork(py::handle value, SessionOptions* options) {
  if (value.is_none()) return;
  const auto network = value.cast<std::array<double, 4>>();
  options->network.allreduce = {network[0], network[1]};
  options->network.allgather = {network[2], network[3]};
}

void ReadOp(py::handle value, SessionOptions* options) {
  options->reduction.op = static_cast<ReduceOp>(value.cast<int>());
}
void ReadPrescale(py::handle value, SessionOptions* options) { options->reduction.prescale = value.cast<double>(); }
void ReadPostscale(py::handle value, SessionOptions* options) { options->reduction.postscale = value.cast<double>(); }
void ReadPolicy(py::handle value, SessionOptions* options) {
  options->policy = Parse(ParsePolicy, value.cast<std::string>());
}
void ReadDense(py::handle value, SessionOptions* options) {
  options->dense = Parse(ParseDense, value.cast<std::string>());
}
void ReadReduceIn(py::handle value, SessionOptions* options) {
  options->reduce_in_backward = value.cast<std::string>() == "backward";
}
void ReadCompress(py::handle value, SessionOptions* options) { options->compress = WrapCompressor(value); }
void ReadDecompress(py::handle value, SessionOptions* options) { options->decompress = WrapCompressor(value); }
void ReadBefore(py::handle value, SessionOptions* options) { options->before = WrapHook(value); }
void ReadReduce(py::handle value, SessionOptions* options) { options->reduce = WrapReduce(value); }

struct Option {
  const char* name;
  Reader read;
  bool required = false;
};

// An option that the configuration gives has its field's name there (poseidon_hvd/config.py).
constexpr Option kOptions[] = {
    {"names", Into<&SessionOptions::names>, true},
    {"params", Into<&SessionOptions::params>, true},
    {"groups", Into<&SessionOptions::groups>},
    {"op", ReadOp, true},
    {"prescale", ReadPrescale},
    {"postscale", ReadPostscale},
    {"passes_per_step", Into<&SessionOptions::passes_per_step>},
    {"compression", ReadCompression},
    {"compress", ReadCompress},
    {"decompress", ReadDecompress},
    {"sparse_as_dense", Into<&SessionOptions::sparse_as_dense>},
    {"process_set", Into<&SessionOptions::process_set>, true},
    {"rank", Into<&SessionOptions::rank>, true},
    {"size", Into<&SessionOptions::size>, true},
    {"tag", Into<&SessionOptions::tag>, true},
    {"settings", Into<&SessionOptions::settings>, true},
    {"max_gathered_elements", ReadMaxGatheredElements},
    {"before", ReadBefore},
    {"hooked", Into<&SessionOptions::hooked>},
    {"reduce", ReadReduce},
    {"policy", ReadPolicy, true},
    {"schemes", ReadSchemes, true},
    {"network", ReadNetwork},
    {"memory_limit", Into<&SessionOptions::gather_memory_bytes>},
    {"uneven_steps", Into<&SessionOptions::uneven_steps>},
    {"dense", ReadDense},
    {"reduce_in", ReadReduceIn},
};

SessionOptions ReadOptions(const py::dict& given) {
  SessionOptions options;
  size_t known = 0;
  for (const Option& option : kOptions) {
    if (!given.contains(option.name)) {
      if (option.required) throw py::type_error(std::string("Session: the option ") + option.name + " is missing.");
      continue;
    }
    ++known;
    const py::object value = given[option.name];
    try {
      option.read(value, &options);
    } catch (const py::cast_error&) {
      throw py::type_error(std::string("Session: the option ") + option.name + " cannot be made of a " +
                           py::str(py::type::of(value).attr("__name__")).cast<std::string>() + ".");
    }
  }
  if (known == given.size()) return options;
  for (const auto& item : given) {
    const auto name = item.first.cast<std::string>();
    const auto same = [&name](const Option& option) { return name == option.name; };
    if (std::none_of(std::begin(kOptions), std::end(kOptions), same)) {
      throw py::type_error("Session: there is no option " + name + ".");
    }
  }
  return options;
}

std::shared_ptr<Session> MakeSession(const std::shared_ptr<Engine>& engine, const py::kwargs& options) {
  return Session::Create(engine, ReadOptions(options));
}

std::vector<std::string> OptionNames() {
  std::vector<std::string> names;
  for (const Option& option : kOptions) names.emplace_back(option.name);
  return names;
}

}  // namespace

void BindSession(py::module_& m) {
  py::class_<Session, std::shared_ptr<Session>>(m, "Session")
      .def(py::init(&MakeSession), py::arg("engine"))
      .def_static("option_names", &OptionNames)
      .def("synchronize", &Session::Synchronize, ReleaseGil())
      .def("reduce_in_backward", &Session::ReduceInBackward, ReleaseGil())
      .def("discard", &Session::Discard, ReleaseGil())
      .def("set_hooks_after", &Session::SetHooksAfter, ReleaseGil())
      .def("reset", &Session::Reset, ReleaseGil())
      .def("set_passes_per_step", &Session::SetPassesPerStep, ReleaseGil())
      .def("note_zeroed", &Session::NoteZeroed, ReleaseGil())
      .def("note_updated", &Session::NoteUpdated, ReleaseGil())
      .def("note_wait", &Session::NoteWait, ReleaseGil())
      .def("note_join", &Session::NoteJoin, ReleaseGil())
      .def("sum_over_ranks", &Session::SumOverRanks, ReleaseGil(), py::arg("what"), py::arg("value"))
      .def("touched_parameters", &Session::TouchedParameters, ReleaseGil())
      .def("collected_parameters", &Session::CollectedParameters, ReleaseGil())
      .def("delays", &Session::Delays, ReleaseGil())
      .def("active_parameters", &Session::ActiveParameters, ReleaseGil())
      .def("take_warnings", &Session::TakeWarnings, ReleaseGil())
      .def("plan",
           [](const Session& session) {
             Plan plan;
             {
               py::gil_scoped_release release;
               plan = session.CurrentPlan();
             }
             return ToDict(plan);
           })
      .def("stats", [](const Session& session) {
        SessionStats stats;
        {
          py::gil_scoped_release release;
          stats = session.Stats();
        }
        return ToDict(stats);
      });
}

}  // namespace poseidon
