// poseidon_hvd._C: what Python sees of the engine. No logic here: conversions, Python's lock, and the table of
// exception types.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "core/base/bounds.h"
#include "core/engine/engine.h"
#include "core/plan/dense_layout.h"
#include "core/schemes/scheme.h"
#include "horovod/horovod_transport.h"
#include "python/model.h"
#include "python/parse.h"
#include "python/python_error.h"
#include "python/session.h"
#include "torch/owners.h"

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

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (PythonError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });

  m.attr("horovod_version") = CompiledHorovodVersion();
  m.attr("torch_version") = POSEIDON_TORCH_VERSION;
  m.def("check_horovod_layout", [] { ThrowIfError(CheckHorovodLayout()); });
  m.def("horovod_library_path", &HorovodLibraryPath);
  // horovod_internal_error: raised when Horovod itself failed; elastic training recovers from exactly that type.
  m.def("set_exceptions", [](const py::object& horovod_internal_error) {
    PythonError::SetType(StatusCode::kInvalidArgument, PyExc_ValueError);
    PythonError::SetType(StatusCode::kFailedPrecondition, PyExc_RuntimeError);
    PythonError::SetType(StatusCode::kInternal, PyExc_RuntimeError);
    PythonError::SetType(StatusCode::kAssertion, PyExc_AssertionError);
    PythonError::SetType(StatusCode::kAborted, horovod_internal_error.ptr());
    PythonError::SetType(StatusCode::kOutOfMemory, horovod_internal_error.ptr());
    PythonError::SetType(StatusCode::kUnavailable, py::object(horovod_internal_error).release().ptr());
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

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&MakeEngine), py::kw_only(), py::arg("stall_warning_seconds"), py::arg("rank"))
      .def("forget_failures", &Engine::ForgetFailures, ReleaseGil())
      .def("stop", &Engine::Stop, ReleaseGil());

  BindModel(m);
  BindSession(m);
}

}  // namespace poseidon
