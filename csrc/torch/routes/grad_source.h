// A parameter's gradient as the dense path sends it: in place where it can, through a copy where it must.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>

#include "core/schemes/codec.h"
#include "core/schemes/dense_exchange.h"

namespace poseidon {

// Compression.none, Compression.fp16, or a compressor class written in Python.
enum class CompressionKind { kNone, kFp16, kPython };

class GradSource final : public DenseSource {
 public:
  // format: for all but kPython. compress: for kPython; returns the tensor to send. May take Python's lock.
  GradSource(std::string name, at::Tensor param, CompressionKind compression, const WireFormat& format,
             std::function<at::Tensor(const at::Tensor&)> compress);

  // A missing gradient is sent, and becomes, zeros: another rank may have one.
  Status PrepareWire(Buffer* wire) override;
  bool needs_restore() const override { return restore_; }
  Status RestoreFromWire() override;
  int64_t copied_bytes() const override { return copied_bytes_; }

  // Training thread, after the exchange: puts the result where the gradient is now. Also releases the wire copy.
  Status FinishOnTrainingThread();

  // kPython: the reduced tensor, still compressed; the caller decompresses. Undefined otherwise.
  at::Tensor TakeCompressed();

 private:
  const std::string name_;
  at::Tensor param_;
  const CompressionKind compression_;
  const WireFormat format_;
  const std::function<at::Tensor(const at::Tensor&)> compress_;
  at::Tensor grad_;  // as of PrepareWire; a strided one over the same memory
  at::Tensor wire_;
  bool restore_ = false;
  int64_t copied_bytes_ = 0;
};

}  // namespace poseidon
