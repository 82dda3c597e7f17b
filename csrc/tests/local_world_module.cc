// Python's view of ranks as threads of one process: engines of poseidon_hvd._C over csrc/tests/local_transport.h, and
// collectives of tensors over the same transport. For tests/harness/world.py; built on demand, never installed.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/engine.h"
#include "tests/local_transport.h"
#include "torch/dtypes.h"

namespace py = pybind11;

namespace poseidon {

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Threads that end here may drop tensors that Python owns, so nobody may join them with Python's lock.
void Delete(LocalWorld* world) {
  if (PyGILState_Check() == 0) return delete world;
  py::gil_scoped_release release;
  delete world;
}

// Runs on rank threads, the transport's thread and the test's own.
class World {
 public:
  World(int size, double max_delay_seconds, unsigned seed)
      : world_(new LocalWorld(size, Microseconds(max_delay_seconds), seed), Delete) {}

  // Sessions hold engines, and through them what the engines run on.
  std::shared_ptr<Engine> engine(int rank) const { return {world_, world_->engines.at(rank).get()}; }
  LocalCluster& cluster() const { return world_->cluster; }

  void Stop() const {
    world_->cluster.Shutdown();
    for (const auto& engine : world_->engines) engine->Stop();
  }

 private:
  static std::chrono::microseconds Microseconds(double seconds) {
    return std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  }

  const std::shared_ptr<LocalWorld> world_;
};

// One rank's part in a collective.
class Handle {
 public:
  at::Tensor Wait() {
    const Status status = future_.get();
    if (status.code() == StatusCode::kInvalidArgument) throw std::invalid_argument(status.message());
    if (!status.ok()) throw std::runtime_error(status.message());
    return result_;
  }

  static std::shared_ptr<Handle> Allreduce(const World& world, int rank, const std::string& name,
                                           const at::Tensor& tensor, int op, double prescale, double postscale,
                                           int process_set) {
    auto self = std::make_shared<Handle>();
    self->result_ = tensor.detach().clone(at::MemoryFormat::Contiguous);
    const Reduction reduction{static_cast<ReduceOp>(op), prescale, postscale};
    Transport& transport = *world.cluster().transport(rank);
    self->Enqueued(transport.Allreduce(name, ToBuffer(self->result_), reduction, process_set, Done(self)));
    return self;
  }
  static std::shared_ptr<Handle> Allgather(const World& world, int rank, const std::string& name,
                                           const at::Tensor& tensor, int process_set) {
    auto self = std::make_shared<Handle>();
    self->sent_ = tensor.detach().contiguous();
    const auto allocate = [self](const std::vector<int64_t>& shape) {
      self->result_ = at::empty(shape, self->sent_.options());
      return ToBuffer(self->result_);
    };
    Transport& transport = *world.cluster().transport(rank);
    self->Enqueued(transport.Allgather(name, ToBuffer(self->sent_), allocate, process_set, Done(self)));
    return self;
  }

 private:
  // Keeps the tensors alive until then, whatever becomes of the handle.
  static Completion Done(const std::shared_ptr<Handle>& self) {
    return [self](const Status& status) { self->end_.set_value(status); };
  }
  void Enqueued(const Status& status) {
    if (!status.ok()) end_.set_value(status);
  }

  at::Tensor sent_;
  at::Tensor result_;
  std::promise<Status> end_;
  std::shared_future<Status> future_ = end_.get_future().share();
};

py::dict ToDict(const LocalCluster::Executed& executed) {
  py::dict dict;
  dict["name"] = executed.name;
  dict["kind"] = executed.kind;
  dict["dtype"] = Name(executed.dtype);
  dict["bytes"] = executed.bytes;
  dict["process_set"] = executed.process_set;
  dict["ok"] = executed.ok;
  return dict;
}

}  // namespace

PYBIND11_MODULE(_local_world, m) {
  m.attr("ALL_RANKS") = int{LocalCluster::kAllRanks};
  py::class_<Handle, std::shared_ptr<Handle>>(m, "Handle").def("wait", &Handle::Wait, ReleaseGil());
  py::class_<World>(m, "World")
      .def(py::init<int, double, unsigned>(), py::kw_only(), py::arg("size"), py::arg("max_delay_seconds"),
           py::arg("seed"))
      .def("engine", &World::engine, py::arg("rank"))
      .def("stop", &World::Stop, ReleaseGil())
      .def("add_process_set",
           [](const World& world, std::vector<int> ranks) { return world.cluster().AddProcessSet(std::move(ranks)); })
      .def(
          "fail_next",
          [](const World& world, const std::string& name, const std::string& message, int rank) {
            world.cluster().FailNext(name, Status::Unavailable(message), rank);
          },
          py::arg("name"), py::arg("message"), py::arg("rank"))
      .def("log",
           [](const World& world) {
             py::list list;
             for (const auto& executed : world.cluster().log()) list.append(ToDict(executed));
             return list;
           })
      .def("waiting",
           [](const World& world) {
             py::list list;
             for (const auto& waiting : world.cluster().waiting()) {
               list.append(py::make_tuple(waiting.names, waiting.missing));
             }
             return list;
           })
      .def("allreduce", &Handle::Allreduce, ReleaseGil(), py::arg("rank"), py::arg("name"), py::arg("tensor"),
           py::arg("op"), py::arg("prescale"), py::arg("postscale"), py::arg("process_set"))
      .def("allgather", &Handle::Allgather, ReleaseGil(), py::arg("rank"), py::arg("name"), py::arg("tensor"),
           py::arg("process_set"));
}

}  // namespace poseidon
