#include "core/plan.h"

#include <limits>
#include <utility>

#include "core/byte_io.h"

namespace poseidon {
namespace {

constexpr uint32_t kMagic = 0x354e4c50;     // "PLN5"; the digit changes with the format
constexpr size_t kMinDecisionBytes = 58;  // name and reason empty
constexpr size_t kMinSliceBytes = 28;     // one tensor

int ReadInt(ByteReader* reader) {
  const int64_t value = reader->ReadI64();
  if (value < 0 || value > std::numeric_limits<int>::max()) reader->Fail();
  return reader->ok() ? static_cast<int>(value) : 0;
}

void Write(const AlphaBeta& model, ByteWriter* writer) {
  writer->WriteDouble(model.alpha);
  writer->WriteDouble(model.beta);
}

void Read(ByteReader* reader, AlphaBeta* model) {
  model->alpha = reader->ReadDouble();
  model->beta = reader->ReadDouble();
}

void Write(const StepEstimate& estimate, ByteWriter* writer) {
  for (double value : {estimate.step, estimate.compute, estimate.channel, estimate.rebuild}) writer->WriteDouble(value);
}

void Read(ByteReader* reader, StepEstimate* estimate) {
  for (double* value : {&estimate->step, &estimate->compute, &estimate->channel, &estimate->rebuild}) *value = reader->ReadDouble();
}

}  // namespace

std::vector<uint8_t> EncodePlan(const Plan& plan) {
  ByteWriter writer;
  writer.WriteU32(kMagic);
  writer.WriteI64(plan.size);
  writer.WriteI64(plan.reconstruct_threads);
  writer.WriteI64(plan.made_at_step);
  Write(plan.network.allreduce, &writer);
  Write(plan.network.allgather, &writer);
  writer.WriteDouble(plan.network.skew_seconds);
  writer.WriteBool(plan.network.clamped);
  writer.WriteBool(plan.prediction.known);
  Write(plan.prediction.chosen, &writer);
  Write(plan.prediction.dense, &writer);
  writer.WriteDouble(plan.prediction.load.allreduce);
  writer.WriteDouble(plan.prediction.load.allgather);
  writer.WriteU32(static_cast<uint32_t>(plan.decisions.size()));
  for (const TensorDecision& decision : plan.decisions) {
    writer.WriteString(decision.name);
    writer.WriteU8(static_cast<uint8_t>(decision.scheme));
    writer.WriteDouble(decision.allreduce_bytes);
    writer.WriteDouble(decision.sfb_bytes);
    writer.WriteDouble(decision.allreduce_seconds);
    writer.WriteDouble(decision.gather_seconds);
    writer.WriteI64(decision.global_rows);
    writer.WriteString(decision.reason);
    writer.WriteBool(decision.request_refused);
    writer.WriteDouble(decision.row_sparse_bytes);
  }
  writer.WriteU8(static_cast<uint8_t>(plan.dense_method));
  writer.WriteU32(static_cast<uint32_t>(plan.slices.size()));
  for (const DenseSlice& slice : plan.slices) {
    writer.WriteI64Vector({slice.tensors.begin(), slice.tensors.end()});
    writer.WriteI64(slice.part);
    writer.WriteI64(slice.parts);
  }
  return writer.Take();
}

Status DecodePlan(const void* data, size_t size, Plan* out) {
  ByteReader reader(data, size);
  if (reader.ReadU32() != kMagic) reader.Fail();
  out->size = ReadInt(&reader);
  out->reconstruct_threads = ReadInt(&reader);
  out->made_at_step = reader.ReadI64();
  Read(&reader, &out->network.allreduce);
  Read(&reader, &out->network.allgather);
  out->network.skew_seconds = reader.ReadDouble();
  out->network.clamped = reader.ReadBool();
  out->prediction.known = reader.ReadBool();
  Read(&reader, &out->prediction.chosen);
  Read(&reader, &out->prediction.dense);
  out->prediction.load.allreduce = reader.ReadDouble();
  out->prediction.load.allgather = reader.ReadDouble();
  out->decisions.clear();
  const uint32_t count = reader.ReadCount(kMinDecisionBytes);
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    TensorDecision decision;
    decision.name = reader.ReadString();
    decision.scheme = reader.ReadEnum(Scheme::kRowSparse);
    decision.allreduce_bytes = reader.ReadDouble();
    decision.sfb_bytes = reader.ReadDouble();
    decision.allreduce_seconds = reader.ReadDouble();
    decision.gather_seconds = reader.ReadDouble();
    decision.global_rows = reader.ReadI64();
    if (decision.global_rows < 0) reader.Fail();
    decision.reason = reader.ReadString();
    decision.request_refused = reader.ReadBool();
    decision.row_sparse_bytes = reader.ReadDouble();
    out->decisions.push_back(std::move(decision));
  }
  out->dense_method = reader.ReadEnum(DenseMethod::kAuto);
  out->slices.clear();
  const uint32_t slices = reader.ReadCount(kMinSliceBytes);
  for (uint32_t i = 0; i < slices && reader.ok(); ++i) {
    DenseSlice slice;
    for (int64_t tensor : reader.ReadI64Vector()) {
      if (tensor < 0 || tensor >= static_cast<int64_t>(count)) reader.Fail();
      slice.tensors.push_back(static_cast<int>(tensor));
    }
    slice.part = ReadInt(&reader);
    slice.parts = ReadInt(&reader);
    if (slice.tensors.empty() || slice.part < 0 || slice.part >= slice.parts) reader.Fail();
    out->slices.push_back(std::move(slice));
  }
  if (reader.Finished()) return Status::OK();
  return Status::InvalidArgument("cannot read the plan of " + std::to_string(size) +
                                 " bytes; install the same version of poseidon_hvd on every rank");
}

uint64_t HashBytes(const void* data, size_t size) {
  uint64_t hash = 14695981039346656037ull;
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  return hash;
}

uint64_t HashPlan(const std::vector<uint8_t>& encoded_plan, const std::vector<LocalTensor>& local) {
  ByteWriter writer;
  // Lengths are written too, so that no two different inputs run together into the same bytes.
  writer.WriteU64(encoded_plan.size());
  for (uint8_t byte : encoded_plan) writer.WriteU8(byte);
  for (const LocalTensor& tensor : local) {
    writer.WriteString(tensor.name);
    writer.WriteI64Vector(tensor.shape);
  }
  return HashBytes(writer.bytes().data(), writer.bytes().size());
}

}  // namespace poseidon
