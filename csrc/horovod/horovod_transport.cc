#include "horovod/horovod_transport.h"
#include "horovod/traits.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include <horovod/common/common.h>
#include <horovod/common/operations.h>

#ifndef POSEIDON_HOROVOD_VERSION
#error "POSEIDON_HOROVOD_VERSION must be defined by the build"
#endif

namespace poseidon {

namespace hc = horovod::common;

namespace {

Status FromHorovod(const hc::Status& status) {
  switch (status.type()) {
    case hc::StatusType::OK:
    case hc::StatusType::IN_PROGRESS:
      return Status::OK();
    case hc::StatusType::INVALID_ARGUMENT:
      return Status::InvalidArgument(status.reason());
    case hc::StatusType::ABORTED:
      return Status::Aborted(status.reason());
    case hc::StatusType::UNKNOWN_ERROR:  // of the shutdown too, which is the consequence of something else
      if (status.reason() == hc::SHUT_DOWN_ERROR.reason()) return Status::Aborted(status.reason());
      return Status::Unavailable(status.reason());
    default:
      return Status::Unavailable(status.reason());
  }
}

Status ToHorovod(DType dtype, hc::DataType* out) {
  switch (dtype) {
    case DType::kUInt8:
      *out = hc::HOROVOD_UINT8;
      return Status::OK();
    case DType::kInt8:
      *out = hc::HOROVOD_INT8;
      return Status::OK();
    case DType::kInt16:
      *out = hc::HOROVOD_INT16;
      return Status::OK();
    case DType::kInt32:
      *out = hc::HOROVOD_INT32;
      return Status::OK();
    case DType::kInt64:
      *out = hc::HOROVOD_INT64;
      return Status::OK();
    case DType::kFloat16:
      *out = hc::HOROVOD_FLOAT16;
      return Status::OK();
    case DType::kFloat32:
      *out = hc::HOROVOD_FLOAT32;
      return Status::OK();
    case DType::kFloat64:
      *out = hc::HOROVOD_FLOAT64;
      return Status::OK();
    default:
      return Status::InvalidArgument(std::string("Horovod cannot send ") + Name(dtype) + ".");
  }
}

DType FromHorovod(hc::DataType dtype) {
  switch (dtype) {
    case hc::HOROVOD_UINT8:
      return DType::kUInt8;
    case hc::HOROVOD_INT8:
      return DType::kInt8;
    case hc::HOROVOD_INT16:
      return DType::kInt16;
    case hc::HOROVOD_INT32:
      return DType::kInt32;
    case hc::HOROVOD_INT64:
      return DType::kInt64;
    case hc::HOROVOD_FLOAT16:
      return DType::kFloat16;
    case hc::HOROVOD_FLOAT32:
      return DType::kFloat32;
    case hc::HOROVOD_FLOAT64:
      return DType::kFloat64;
    default:
      return DType::kOther;
  }
}

// bfloat16 in an allgather: 0.28.1 has no such type, and moving bytes needs none.
DType GatherDType(DType dtype) { return dtype == DType::kBFloat16 ? DType::kInt16 : dtype; }

// The base class returns const values, and an override must repeat that.
#pragma GCC diagnostic ignored "-Wignored-qualifiers"

class HostTensor final : public hc::Tensor {
 public:
  HostTensor(const Buffer& buffer, hc::DataType dtype) : buffer_(buffer), dtype_(dtype) {}

  const hc::DataType dtype() const override { return dtype_; }
  const hc::TensorShape shape() const override { return hc::TensorShape(buffer_.shape); }
  const void* data() const override { return buffer_.data; }
  int64_t size() const override { return buffer_.bytes(); }

 private:
  const Buffer buffer_;
  const hc::DataType dtype_;
};

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using OwnedMemory = std::unique_ptr<void, FreeDeleter>;

OwnedMemory Allocate(int64_t bytes) {
  void* p = std::malloc(bytes > 0 ? bytes : 1);
  if (p == nullptr) throw std::bad_alloc();
  return OwnedMemory(p);
}

// Horovod's fusion buffer, when an operation of ours is the first to need it. Lives as long as Horovod.
class HostPersistentBuffer final : public hc::PersistentBuffer {
 public:
  explicit HostPersistentBuffer(int64_t bytes) : memory_(Allocate(bytes)) {}
  const void* AccessData(std::shared_ptr<hc::OpContext>) const override { return memory_.get(); }

 private:
  const OwnedMemory memory_;
};

// Zeros that stand in for a rank that has joined.
class ZeroTensor final : public hc::Tensor {
 public:
  ZeroTensor(int64_t elements, hc::DataType dtype) : elements_(elements), dtype_(dtype), memory_(Allocate(size())) {
    std::memset(memory_.get(), 0, size());
  }
  const hc::DataType dtype() const override { return dtype_; }
  const hc::TensorShape shape() const override { return hc::TensorShape({elements_}); }
  const void* data() const override { return memory_.get(); }
  int64_t size() const override { return elements_ * SizeOf(FromHorovod(dtype_)); }

 private:
  const int64_t elements_;
  const hc::DataType dtype_;
  const OwnedMemory memory_;
};

// One enqueued tensor's completion. Horovod drops the callbacks of what it is at when an exception ends its loop, so
// being dropped completes it too.
class PendingCall {
 public:
  explicit PendingCall(Completion done) : done_(std::move(done)) {}
  ~PendingCall() { Complete(Status::Aborted(hc::SHUT_DOWN_ERROR.reason())); }

  void Complete(const Status& status) noexcept {
    if (const Completion done = std::exchange(done_, nullptr)) done(failure_.ok() ? status : failure_);
  }
  // Horovod did not take it.
  void Drop() { done_ = nullptr; }

  // An allocation has failed on this rank. The others are in the collective, or will be, and wait there for this rank:
  // for Horovod's timeout of 30 s over gloo, for ever over MPI. So Horovod's loop has to end here, as it does when a
  // connection fails; then they see this one's end.
  void BreakDown(Status failure) { failure_ = std::move(failure); }
  const Status& failure() const { return failure_; }

 private:
  Completion done_;
  Status failure_;
};

class HostContext final : public hc::OpContext {
 public:
  HostContext(std::shared_ptr<PendingCall> call, Allocator allocate, hc::DataType dtype)
      : call_(std::move(call)), allocate_(std::move(allocate)), dtype_(dtype) {}

  // Horovod lets an exception end its loop here.
  hc::Status AllocatePersistent(int64_t size, std::shared_ptr<hc::PersistentBuffer>* tensor) override {
    try {
      *tensor = std::make_shared<HostPersistentBuffer>(size);
    } catch (const std::bad_alloc&) {
      call_->BreakDown(Status::OutOfMemory("out of memory: " + std::to_string(size) +
                                           " bytes for Horovod's fusion buffer. Lower HOROVOD_FUSION_THRESHOLD."));
      throw std::runtime_error(call_->failure().message());
    }
    return hc::Status::OK();
  }
  // And here it does not, so the callback does.
  hc::Status AllocateOutput(hc::TensorShape shape, std::shared_ptr<hc::Tensor>* tensor,
                            std::shared_ptr<hc::ReadyEvent>*) override {
    try {
      *tensor = std::make_shared<HostTensor>(allocate_(shape.to_vector()), dtype_);
    } catch (const std::exception& error) {
      call_->BreakDown(Status::OutOfMemory(error.what()));
      return hc::Status::Aborted("this rank has no memory for the gathered tensors.");  // to those fused with it
    }
    return hc::Status::OK();
  }
  hc::Status AllocateOutput(int, hc::TensorShape shape, std::shared_ptr<hc::Tensor>* tensor,
                            std::shared_ptr<hc::ReadyEvent>* event) override {
    return AllocateOutput(std::move(shape), tensor, event);
  }
  hc::Status AllocateZeros(int64_t num_elements, hc::DataType dtype, std::shared_ptr<hc::Tensor>* tensor) override {
    *tensor = std::make_shared<ZeroTensor>(num_elements, dtype);
    return hc::Status::OK();
  }
  // The key under which Horovod shares one fusion buffer with horovod.torch's own operations.
  hc::Framework framework() const override { return hc::Framework::PYTORCH; }

 private:
  const std::shared_ptr<PendingCall> call_;
  const Allocator allocate_;
  const hc::DataType dtype_;
};

hc::StatusCallback ToCallback(std::shared_ptr<PendingCall> call) {
  return [call = std::move(call)](const hc::Status& status) {
    call->Complete(FromHorovod(status));
    if (!call->failure().ok()) throw std::runtime_error("poseidon_hvd: " + call->failure().message());
  };
}

// Horovod reports most failures by Status and some by throwing.
template <typename Enqueue>
Status Guarded(const std::string& name, const std::vector<std::shared_ptr<PendingCall>>& calls, Enqueue enqueue) {
  Status status;
  try {
    const hc::Status initialized = hc::CheckInitialized();
    status = FromHorovod(initialized.ok() ? enqueue() : initialized);
  } catch (const std::exception& error) {
    status = Status::Unavailable("Horovod refused " + name + ": " + error.what());
  }
  if (status.ok()) return status;
  for (const auto& call : calls) call->Drop();
  return status;
}

class HorovodTransport final : public Transport {
 public:
  Traits traits() const override { return HorovodTraits(); }
  Reduction KeepApart(const Reduction& reduction, DType dtype, int number) const override {
    return HorovodKeepApart(reduction, dtype, number);
  }

  Status Allreduce(const std::string& name, const Buffer& in_out, const Reduction& reduction, int process_set,
                   Completion done) override {
    hc::DataType dtype;
    Status status = ToHorovod(in_out.dtype, &dtype);
    if (!status.ok()) return Status::InvalidArgument(name + ": " + status.message());
    const auto call = std::make_shared<PendingCall>(std::move(done));
    return Guarded(name, {call}, [&] {
      auto tensor = std::make_shared<HostTensor>(in_out, dtype);
      return hc::EnqueueTensorAllreduce(std::make_shared<HostContext>(call, nullptr, dtype), tensor, tensor,
                                        hc::ReadyEventList(), name, CPU_DEVICE_ID, ToCallback(call),
                                        static_cast<hc::ReduceOp>(reduction.op), reduction.prescale,
                                        reduction.postscale, process_set);
    });
  }

  Status GroupedAllreduce(const std::vector<std::string>& names, const std::vector<Buffer>& in_out,
                          const Reduction& reduction, int process_set, std::vector<Completion> done) override {
    std::vector<std::shared_ptr<hc::OpContext>> contexts;
    std::vector<std::shared_ptr<hc::Tensor>> tensors;
    std::vector<hc::ReadyEventList> ready(in_out.size());
    std::vector<hc::StatusCallback> callbacks;
    std::vector<std::shared_ptr<PendingCall>> calls;
    for (Completion& each : done) calls.push_back(std::make_shared<PendingCall>(std::move(each)));
    for (size_t i = 0; i < in_out.size(); ++i) {
      hc::DataType dtype;
      Status status = ToHorovod(in_out[i].dtype, &dtype);
      if (!status.ok()) {
        for (const auto& call : calls) call->Drop();
        return Status::InvalidArgument(names[i] + ": " + status.message());
      }
      contexts.push_back(std::make_shared<HostContext>(calls[i], nullptr, dtype));
      tensors.push_back(std::make_shared<HostTensor>(in_out[i], dtype));
      callbacks.push_back(ToCallback(calls[i]));
    }
    std::vector<std::shared_ptr<hc::Tensor>> outputs = tensors;
    std::vector<std::string> wire_names = names;
    return Guarded(names[0], calls, [&] {
      return hc::EnqueueTensorAllreduces(contexts, tensors, outputs, ready, wire_names, CPU_DEVICE_ID, callbacks,
                                         static_cast<hc::ReduceOp>(reduction.op), reduction.prescale,
                                         reduction.postscale, process_set);
    });
  }

  Status Allgather(const std::string& name, const Buffer& in, Allocator allocate, int process_set,
                   Completion done) override {
    hc::DataType dtype;
    Status status = ToHorovod(GatherDType(in.dtype), &dtype);
    if (!status.ok()) return Status::InvalidArgument(name + ": " + status.message());
    const auto call = std::make_shared<PendingCall>(std::move(done));
    return Guarded(name, {call}, [&] {
      return hc::EnqueueTensorAllgather(std::make_shared<HostContext>(call, std::move(allocate), dtype),
                                        std::make_shared<HostTensor>(in, dtype), hc::ReadyEventList(), name,
                                        CPU_DEVICE_ID, ToCallback(call), process_set);
    });
  }
};

}  // namespace

std::unique_ptr<Transport> MakeHorovodTransport() { return std::make_unique<HorovodTransport>(); }

Status CheckHorovodLayout() {
  // Large enough for every known layout; the library constructs in place, and nothing is destroyed in case sizes
  // differ.
  static union {
    std::max_align_t align;
    unsigned char bytes[512];
  } storage;
  const auto* status = new (storage.bytes) hc::Status(hc::Status::InvalidArgument("layout probe"));
  const auto loaded = reinterpret_cast<const unsigned char*>(&status->reason()) - storage.bytes;
  const auto compiled = static_cast<std::ptrdiff_t>(sizeof(hc::Status) - sizeof(std::string));
  if (loaded == compiled) return Status::OK();
  const auto describe = [](std::ptrdiff_t offset) {
    return offset == 8    ? std::string("without GPU support")
           : offset == 40 ? std::string("with GPU support")
                          : "with an unknown layout (" + std::to_string(offset) + ")";
  };
  return Status::FailedPrecondition("poseidon_hvd was compiled for a Horovod " + describe(compiled) +
                                    ", but the installed Horovod was built " + describe(loaded) +
                                    ". Rebuild poseidon_hvd against it: pip install --no-build-isolation "
                                    "--force-reinstall --no-deps poseidon_hvd's source folder.");
}

std::string HorovodLibraryPath() {
  using Function = hc::Status (*)(std::shared_ptr<hc::OpContext>, std::shared_ptr<hc::Tensor>, hc::ReadyEventList,
                                  const std::string&, int, hc::StatusCallback, int32_t);
  const Function function = &hc::EnqueueTensorAllgather;
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(function), &info) == 0 || info.dli_fname == nullptr) return "";
  return info.dli_fname;
}

const char* CompiledHorovodVersion() { return POSEIDON_HOROVOD_VERSION; }

}  // namespace poseidon
