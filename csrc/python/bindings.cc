// poseidon_hvd._C: what Python sees of the engine. No logic here: conversions, Python's lock, and the table of
// exception types.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/base/bounds.h"
#include "core/engine/engine.h"
#include "core/schemes/scheme.h"
#include "horovod/horovod_transport.h"
#include "python/model.h"
#include "python/parse.h"
#include "python/plan.h"
#include "torch/owners.h"
#include "torch/session.h"
#include "torch/status_error.h"

namespace py = pybind11;

namespace poseidon {

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// The engine and its transport are never freed: Horovod may call back into them while the process ends.
std::shared_ptr<Engine> MakeEngine(double stall_warning_seconds, int rank) {
  Engine::Options options;
  options.stall_warning_seconds = stall_warning_seconds;
  options.log_warning = [rank](const std::string& message) {
    const std::string sessions = DescribeSessions();
    std::fprintf(stderr, "[poseidon_hvd] rank %d: %s This rank's optimizers, by the number in those names: %s.\n", rank,
                 message.c_str(), sessions.empty() ? "none" : sessions.c_str());
  };
  return std::shared_ptr<Engine>(new Engine(MakeHorovodTransport().release(), std::move(options)), [](Engine*) {});
}

// Python code, called from autograd's threads and destroyed by whichever thread drops the session.
std::shared_ptr<py::object> Share(const py::object& function) {
  return std::shared_ptr<py::object>(new py::object(function), [](py::object* object) {
    py::gil_scoped_acquire gil;
    delete object;
  });
}

std::function<at::Tensor(int, const at::Tensor&)> WrapCompressor(const py::object& compress) {
  if (compress.is_none()) return nullptr;
  return [function = Share(compress)](int index, const at::Tensor& tensor) {
    py::gil_scoped_acquire gil;
    return (*function)(index, tensor).cast<at::Tensor>();
  };
}

std::function<void(int, const at::Tensor&)> WrapHook(const py::object& hook) {
  if (hook.is_none()) return nullptr;
  return [function = Share(hook)](int index, const at::Tensor& grad) {
    py::gil_scoped_acquire gil;
    (*function)(index, grad);
  };
}

std::function<void()> WrapReduce(const py::object& reduce) {
  if (reduce.is_none()) return nullptr;
  return [function = Share(reduce)] {
    py::gil_scoped_acquire gil;
    (*function)();
  };
}

std::shared_ptr<Session> MakeSession(const std::shared_ptr<Engine>& engine, std::vector<std::string> names,
                                     std::vector<at::Tensor> params, std::vector<std::vector<int>> groups, int op,
                                     double prescale, double postscale, int passes_per_step,
                                     const std::string& compression, const py::object& compress, bool sparse_as_dense,
                                     int process_set, int rank, int size, std::string tag, const std::string& policy,
                                     const std::vector<std::string>& overrides, std::string settings,
                                     std::optional<int64_t> max_gathered_elements,
                                     const std::optional<std::vector<double>>& network, double gather_memory_bytes,
                                     bool uneven_steps, const py::object& before, std::vector<bool> hooked,
                                     const std::string& dense, bool reduce_in_backward, const py::object& reduce) {
  SessionOptions options;
  options.names = std::move(names);
  options.params = std::move(params);
  options.groups = std::move(groups);
  options.reduction = {static_cast<ReduceOp>(op), prescale, postscale};
  options.passes_per_step = passes_per_step;
  options.compression = compression == "none"   ? CompressionKind::kNone
                        : compression == "fp16" ? CompressionKind::kFp16
                                                : CompressionKind::kPython;
  options.compress = WrapCompressor(compress);
  options.sparse_as_dense = sparse_as_dense;
  options.process_set = process_set;
  options.rank = rank;
  options.size = size;
  options.tag = std::move(tag);
  options.policy = Parse(ParsePolicy, policy);
  for (const std::string& value : overrides) options.overrides.push_back(Parse(ParseSchemeOverride, value));
  options.settings = std::move(settings);
  if (max_gathered_elements) options.max_gathered_elements = *max_gathered_elements;
  if (network) {
    options.network.allreduce = {network->at(0), network->at(1)};
    options.network.allgather = {network->at(2), network->at(3)};
  }
  options.gather_memory_bytes = gather_memory_bytes;
  options.uneven_steps = uneven_steps;
  options.before = WrapHook(before);
  options.hooked = std::move(hooked);
  options.reduce_in_backward = reduce_in_backward;
  options.reduce = WrapReduce(reduce);
  ThrowIfError(ParseDense(dense, &options.dense));
  return Session::Create(engine, std::move(options));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (StatusError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });

  m.attr("horovod_version") = CompiledHorovodVersion();
  m.attr("torch_version") = POSEIDON_TORCH_VERSION;
  m.def("check_horovod_layout", [] { ThrowIfError(CheckHorovodLayout()); });
  m.def("horovod_library_path", &HorovodLibraryPath);
  // horovod_internal_error: raised when Horovod itself failed; elastic training recovers from exactly that type.
  m.def("set_exceptions", [](const py::object& horovod_internal_error) {
    StatusError::SetPythonType(StatusCode::kInvalidArgument, PyExc_ValueError);
    StatusError::SetPythonType(StatusCode::kFailedPrecondition, PyExc_RuntimeError);
    StatusError::SetPythonType(StatusCode::kInternal, PyExc_RuntimeError);
    StatusError::SetPythonType(StatusCode::kAssertion, PyExc_AssertionError);
    StatusError::SetPythonType(StatusCode::kAborted, horovod_internal_error.ptr());
    StatusError::SetPythonType(StatusCode::kOutOfMemory, horovod_internal_error.ptr());
    StatusError::SetPythonType(StatusCode::kUnavailable, py::object(horovod_internal_error).release().ptr());
  });

  // Ranges of what the user gives.
  m.attr("most_alpha") = kMostAlpha;
  m.attr("most_beta") = kMostBeta;
  m.attr("most_bytes") = kMostBytes;
  m.attr("most_seconds") = kMostSeconds;
  m.def("parse_policy", [](const std::string& text) { return Name(Parse(ParsePolicy, text)); });
  m.def("parse_dense", [](const std::string& text) {
    DenseSettings settings;
    ThrowIfError(ParseDense(text, &settings));
    return std::make_pair(Name(settings.method), settings.theta);
  });
  m.def("parse_scheme_override", [](const std::string& text) { return Name(Parse(ParseSchemeOverride, text)); });

  BindModel(m);

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&MakeEngine), py::kw_only(), py::arg("stall_warning_seconds"), py::arg("rank"))
      .def("forget_failures", &Engine::ForgetFailures, ReleaseGil())
      .def("stop", &Engine::Stop, ReleaseGil());

  py::class_<Session, std::shared_ptr<Session>>(m, "Session")
      .def(py::init(&MakeSession), py::kw_only(), py::arg("engine"), py::arg("names"), py::arg("params"),
           py::arg("groups"), py::arg("op"), py::arg("prescale"), py::arg("postscale"), py::arg("passes_per_step"),
           py::arg("compression"), py::arg("compress"), py::arg("sparse_as_dense"), py::arg("process_set"),
           py::arg("rank"), py::arg("size"), py::arg("tag"), py::arg("policy"), py::arg("overrides"),
           py::arg("settings"), py::arg("max_gathered_elements") = std::nullopt, py::arg("network") = std::nullopt,
           py::arg("gather_memory_bytes") = 2e9, py::arg("uneven_steps") = false, py::arg("before") = py::none(),
           py::arg("hooked") = std::vector<bool>{}, py::arg("dense") = "auto", py::arg("reduce_in_backward") = true,
           py::arg("reduce") = py::none())
      .def("begin_reduce", &Session::BeginReduce, ReleaseGil())
      .def("collect", &Session::Collect, ReleaseGil())
      .def("discard", &Session::Discard, ReleaseGil())
      .def("set_hooks_after", &Session::SetHooksAfter, ReleaseGil())
      .def("flush", &Session::Flush, ReleaseGil())
      .def("finish", &Session::Finish, ReleaseGil())
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
