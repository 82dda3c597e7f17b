#include "core/plan.h"

#include <limits>
#include <utility>

#include "core/byte_io.h"

namespace poseidon {
namespace {

constexpr uint32_t kMagic = 0x324e4c50;     // "PLN2"; the digit changes with the format
constexpr size_t kMinDecisionBytes = 42;  // name and reason empty

int ReadInt(ByteReader* reader) {
  const int64_t value = reader->ReadI64();
  if (value < 0 || value > std::numeric_limits<int>::max()) reader->Fail();
  return reader->ok() ? static_cast<int>(value) : 0;
}

}  // namespace

std::vector<uint8_t> EncodePlan(const Plan& plan) {
  ByteWriter writer;
  writer.WriteU32(kMagic);
  writer.WriteI64(plan.size);
  writer.WriteI64(plan.reconstruct_threads);
  writer.WriteU32(static_cast<uint32_t>(plan.decisions.size()));
  for (const TensorDecision& decision : plan.decisions) {
    writer.WriteString(decision.name);
    writer.WriteU8(static_cast<uint8_t>(decision.scheme));
    writer.WriteDouble(decision.allreduce_bytes);
    writer.WriteDouble(decision.sfb_bytes);
    writer.WriteI64(decision.global_rows);
    writer.WriteString(decision.reason);
    writer.WriteBool(decision.request_refused);
    writer.WriteDouble(decision.row_sparse_bytes);
  }
  return writer.Take();
}

Status DecodePlan(const void* data, size_t size, Plan* out) {
  ByteReader reader(data, size);
  if (reader.ReadU32() != kMagic) reader.Fail();
  out->size = ReadInt(&reader);
  out->reconstruct_threads = ReadInt(&reader);
  out->decisions.clear();
  const uint32_t count = reader.ReadCount(kMinDecisionBytes);
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    TensorDecision decision;
    decision.name = reader.ReadString();
    decision.scheme = reader.ReadEnum(Scheme::kRowSparse);
    decision.allreduce_bytes = reader.ReadDouble();
    decision.sfb_bytes = reader.ReadDouble();
    decision.global_rows = reader.ReadI64();
    if (decision.global_rows < 0) reader.Fail();
    decision.reason = reader.ReadString();
    decision.request_refused = reader.ReadBool();
    decision.row_sparse_bytes = reader.ReadDouble();
    out->decisions.push_back(std::move(decision));
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
