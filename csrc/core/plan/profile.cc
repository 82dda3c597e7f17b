#include "core/plan/profile.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

#include "core/base/byte_io.h"

namespace poseidon {
namespace {

constexpr uint32_t kMagic = 0x36465250;  // "PRF6"; the digit changes with the format
constexpr size_t kMinTensorBytes = 62;   // name, shape and reason empty

int64_t ReadCounted(ByteReader* reader) {
  const int64_t value = reader->ReadI64();
  if (value < 0 || value > kMostCount) reader->Fail();
  return value;
}

std::string Describe(const TensorProfile& tensor) {
  return tensor.name + " " + ShapeText(tensor.shape) + " " + Name(tensor.dtype);
}

std::string Differ(const std::string& what, const std::string& first, size_t rank, const std::string& other,
                   const std::string& remedy) {
  return "ranks disagree on " + what + ": rank 0 has " + first + ", rank " + std::to_string(rank) + " has " + other +
         "; " + remedy;
}

// First pair of lines in which the texts differ, both empty if none does.
std::pair<std::string, std::string> FirstDifference(const std::string& a, const std::string& b) {
  std::istringstream first(a), second(b);
  while (first || second) {
    std::string x, y;
    if (!std::getline(first, x)) x = "nothing";
    if (!std::getline(second, y)) y = "nothing";
    if (x != y) return {x, y};
  }
  return {};
}

Status CompareSettings(const RankProfile& first, const RankProfile& other, size_t rank) {
  if (first.settings_hash == other.settings_hash && first.settings_text == other.settings_text) return Status::OK();
  auto [a, b] = FirstDifference(first.settings_text, other.settings_text);
  if (a == b) {
    a = "hash " + std::to_string(first.settings_hash);
    b = "hash " + std::to_string(other.settings_hash);
  }
  return Status::InvalidArgument(Differ("settings", "\"" + a + "\"", rank, "\"" + b + "\"",
                                        "give every rank the same options and POSEIDON_* environment"));
}

Status CompareTensors(const RankProfile& first, const RankProfile& other, size_t rank) {
  const char* remedy = "build the same model and pass its parameters in the same order on every rank";
  const size_t count = std::max(first.tensors.size(), other.tensors.size());
  for (size_t i = 0; i < count; ++i) {
    const TensorProfile* a = i < first.tensors.size() ? &first.tensors[i] : nullptr;
    const TensorProfile* b = i < other.tensors.size() ? &other.tensors[i] : nullptr;
    const bool same = a && b && a->name == b->name && a->shape == b->shape && a->dtype == b->dtype;
    if (same && a->active != b->active) {
      const auto wants = [](bool active) {
        return std::string(active ? "one that wants a gradient" : "one that wants none");
      };
      return Status::InvalidArgument(Differ("parameter " + a->name, wants(a->active), rank, wants(b->active),
                                            "call requires_grad_() alike on all ranks, at the same step"));
    }
    if (same) continue;
    return Status::InvalidArgument(
        Differ("parameter " + std::to_string(i), a ? Describe(*a) : "none", rank, b ? Describe(*b) : "none", remedy));
  }
  return Status::OK();
}

std::string BiasText(const std::string& bias) { return bias.empty() ? "no bias" : "bias " + bias; }

// Why a rank that used the tensor keeps it from SFB; empty if it does not. `base` is the first such rank's.
std::string Objection(const TensorProfile& tensor, const TensorProfile& base) {
  if (!tensor.sfb_allowed) return tensor.reason.empty() ? "SFB not allowed" : tensor.reason;
  if (base.is_embedding && !base.is_linear_weight) {
    if (!tensor.is_embedding || tensor.is_linear_weight) return "not used as an embedding table alone";
    if (tensor.sparse != base.sparse) return "its gradient is sparse on some ranks only";
  } else if (!tensor.is_linear_weight) {
    return "not used as the weight of a linear call";
  }
  if (tensor.factor_dtype != base.factor_dtype) {
    return std::string("factors are ") + Name(tensor.factor_dtype) + " here and " + Name(base.factor_dtype) +
           " on a lower rank";
  }
  if (tensor.bias != base.bias) {
    return "used with " + BiasText(tensor.bias) + " here, with " + BiasText(base.bias) + " on a lower rank";
  }
  return {};
}

MergedTensor MergeTensor(const std::vector<RankProfile>& by_rank, size_t index) {
  MergedTensor merged;
  const TensorProfile* base = nullptr;
  merged.everywhere = true;
  bool linear = false;
  bool embedding = false;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const TensorProfile& tensor = by_rank[rank].tensors[index];
    merged.everywhere = merged.everywhere && tensor.complete;
    merged.rows_by_rank.push_back(tensor.rows);
    merged.global_rows += tensor.rows;
    merged.max_rank_rows = std::max(merged.max_rank_rows, tensor.rows);
    merged.sparse = merged.sparse || tensor.sparse;
    merged.ready_seconds = std::max(merged.ready_seconds, tensor.ready_seconds);
    merged.global_unique_rows += tensor.unique_rows;
    if (!tensor.used) continue;
    if (base == nullptr) base = &tensor;
    linear = linear || tensor.is_linear_weight;
    embedding = embedding || tensor.is_embedding;
    const std::string objection = Objection(tensor, *base);
    if (merged.reason.empty() && !objection.empty()) {
      merged.reason = "rank " + std::to_string(rank) + ": " + objection;
    }
  }
  merged.base = base ? *base : by_rank[0].tensors[index];
  if (base == nullptr) {
    merged.reason = "not used in the profiling step";
  } else {
    merged.base.is_linear_weight = linear;
    merged.base.is_embedding = embedding;
  }
  merged.sfb_allowed = merged.reason.empty();
  return merged;
}

Status CompareLayout(const std::vector<RankProfile>& by_rank, size_t index) {
  const TensorProfile* first = nullptr;
  size_t first_rank = 0;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const TensorProfile& tensor = by_rank[rank].tensors[index];
    if (!tensor.used) continue;
    if (first == nullptr) {
      first = &tensor;
      first_rank = rank;
    }
    if (first->sparse == tensor.sparse) continue;
    const auto kind = [](bool sparse) { return std::string(sparse ? "a sparse one" : "a dense one"); };
    return Status::InvalidArgument("ranks disagree on the gradient of " + tensor.name + ": rank " +
                                   std::to_string(first_rank) + " has " + kind(first->sparse) + ", rank " +
                                   std::to_string(rank) + " has " + kind(tensor.sparse) +
                                   "; give the layer the same sparse= on every rank, or set sparse_as_dense=True");
  }
  return Status::OK();
}

}  // namespace

int64_t NumElements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  for (int64_t extent : shape) {
    if (count > std::numeric_limits<int64_t>::max() / extent) return std::numeric_limits<int64_t>::max();
    count *= extent;
  }
  return count;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

std::vector<uint8_t> EncodeProfile(const RankProfile& profile) {
  ByteWriter writer;
  writer.WriteU32(kMagic);
  writer.WriteU64(profile.settings_hash);
  writer.WriteString(profile.settings_text);
  writer.WriteSeconds(profile.compute_seconds);
  writer.WriteSeconds(profile.step_seconds);
  writer.WriteSeconds(profile.first_step_seconds);
  writer.WriteU32(static_cast<uint32_t>(profile.tensors.size()));
  for (const TensorProfile& tensor : profile.tensors) {
    writer.WriteString(tensor.name);
    writer.WriteI64Vector(tensor.shape);
    writer.WriteU8(static_cast<uint8_t>(tensor.dtype));
    writer.WriteBool(tensor.is_linear_weight);
    writer.WriteString(tensor.bias);
    writer.WriteU8(static_cast<uint8_t>(tensor.factor_dtype));
    writer.WriteI64(tensor.rows);
    writer.WriteI64(tensor.calls);
    writer.WriteBool(tensor.active);
    writer.WriteBool(tensor.used);
    writer.WriteBool(tensor.complete);
    writer.WriteBool(tensor.sparse);
    writer.WriteBool(tensor.sfb_allowed);
    writer.WriteString(tensor.reason);
    writer.WriteOrNone(tensor.ready_seconds, kMostSeconds);
    writer.WriteBool(tensor.is_embedding);
    writer.WriteI64(tensor.unique_rows);
    writer.WriteI64(tensor.order);
  }
  return writer.Take();
}

Status DecodeProfile(const void* data, size_t size, RankProfile* out) {
  ByteReader reader(data, size);
  if (reader.ReadU32() != kMagic) reader.Fail();
  out->settings_hash = reader.ReadU64();
  out->settings_text = reader.ReadString();
  out->compute_seconds = reader.ReadSeconds();
  out->step_seconds = reader.ReadSeconds();
  out->first_step_seconds = reader.ReadSeconds();
  out->tensors.clear();
  const uint32_t count = reader.ReadCount(kMinTensorBytes);
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    TensorProfile tensor;
    tensor.name = reader.ReadString();
    tensor.shape = reader.ReadI64Vector();
    for (int64_t extent : tensor.shape) {
      if (extent < 0 || extent > kMostCount) reader.Fail();
    }
    if (NumElements(tensor.shape) > kMostCount) reader.Fail();
    tensor.dtype = reader.ReadEnum(DType::kOther);
    tensor.is_linear_weight = reader.ReadBool();
    tensor.bias = reader.ReadString();
    tensor.factor_dtype = reader.ReadEnum(DType::kOther);
    tensor.rows = ReadCounted(&reader);
    tensor.calls = ReadCounted(&reader);
    tensor.active = reader.ReadBool();
    tensor.used = reader.ReadBool();
    tensor.complete = reader.ReadBool();
    tensor.sparse = reader.ReadBool();
    tensor.sfb_allowed = reader.ReadBool();
    tensor.reason = reader.ReadString();
    tensor.ready_seconds = reader.ReadOrNone(kMostSeconds);
    tensor.is_embedding = reader.ReadBool();
    tensor.unique_rows = ReadCounted(&reader);
    tensor.order = reader.ReadI64();
    if (tensor.order < -1) reader.Fail();
    out->tensors.push_back(std::move(tensor));
  }
  if (reader.Finished()) return Status::OK();
  return Status::InvalidArgument("cannot read a rank's profile of " + std::to_string(size) +
                                 " bytes; install the same version of poseidon_hvd on every rank");
}

Status MergeProfiles(const std::vector<RankProfile>& by_rank, MergedProfile* out) {
  out->tensors.clear();
  out->compute_seconds = out->step_seconds = out->first_step_seconds = 0;
  if (by_rank.empty()) return Status::Internal("no profiles to merge");
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (Status status = CompareSettings(by_rank[0], by_rank[rank], rank); !status.ok()) return status;
    if (Status status = CompareTensors(by_rank[0], by_rank[rank], rank); !status.ok()) return status;
  }
  for (const RankProfile& profile : by_rank) {
    out->compute_seconds = std::max(out->compute_seconds, profile.compute_seconds);
    out->step_seconds = std::max(out->step_seconds, profile.step_seconds);
    out->first_step_seconds = std::max(out->first_step_seconds, profile.first_step_seconds);
  }
  for (size_t i = 0; i < by_rank[0].tensors.size(); ++i) {
    out->tensors.push_back(MergeTensor(by_rank, i));
  }
  return Status::OK();
}

Status CompareLayouts(const std::vector<RankProfile>& by_rank) {
  for (size_t i = 0; i < by_rank[0].tensors.size(); ++i) {
    if (Status status = CompareLayout(by_rank, i); !status.ok()) return status;
  }
  return Status::OK();
}

}  // namespace poseidon
