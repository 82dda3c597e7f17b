#include "core/plan/plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/base/byte_io.h"
#include "core/plan/profile.h"
#include "core/schemes/registry.h"

namespace poseidon {
namespace {

constexpr uint32_t kMagic = 0x364e4c50;   // "PLN6"; the digit changes with the format
constexpr size_t kMinSchemeBytes = 4;     // name empty
constexpr size_t kMinDecisionBytes = 22;  // name and reason empty, no offers
constexpr size_t kMinOfferBytes = 21;     // no obstacle
constexpr size_t kMinSliceBytes = 28;     // one tensor

int ReadInt(ByteReader* reader) {
  const int64_t value = reader->ReadI64();
  if (value < 0 || value > std::numeric_limits<int>::max()) reader->Fail();
  return reader->ok() ? static_cast<int>(value) : 0;
}

void Write(const AlphaBeta& model, ByteWriter* writer) {
  writer->WriteDoubleWithin(model.alpha, 0, kMostAlpha);
  writer->WriteDoubleWithin(model.beta, 0, kMostBeta);
}

void Read(ByteReader* reader, AlphaBeta* model) {
  model->alpha = reader->ReadDoubleWithin(0, kMostAlpha);
  model->beta = reader->ReadDoubleWithin(0, kMostBeta);
}

void Write(const StepEstimate& estimate, ByteWriter* writer) {
  for (double value : {estimate.step, estimate.compute, estimate.channel, estimate.rebuild}) {
    writer->WriteSeconds(value);
  }
}

void Read(ByteReader* reader, StepEstimate* estimate) {
  for (double* value : {&estimate->step, &estimate->compute, &estimate->channel, &estimate->rebuild}) {
    *value = reader->ReadSeconds();
  }
}

// A table of names in front, and then each scheme by its place there. Only names that occur, in the order of the first
// time.
class SchemeNames {
 public:
  explicit SchemeNames(const Plan& plan) {
    for (const TensorDecision& decision : plan.decisions) {
      Add(decision.scheme);
      for (const Offer& offer : decision.offers) Add(offer.scheme);
    }
  }
  explicit SchemeNames(ByteReader* reader) {
    const uint32_t count = reader->ReadCount(kMinSchemeBytes);
    for (uint32_t i = 0; i < count && reader->ok(); ++i) {
      Scheme scheme;
      if (!ParseScheme(reader->ReadString(), &scheme).ok() || Find(scheme) < schemes_.size()) reader->Fail();
      schemes_.push_back(scheme);
    }
  }

  void Write(ByteWriter* writer) const {
    writer->WriteU32(static_cast<uint32_t>(schemes_.size()));
    for (Scheme scheme : schemes_) writer->WriteString(Name(scheme));
  }
  void Write(Scheme scheme, ByteWriter* writer) const { writer->WriteU8(static_cast<uint8_t>(Find(scheme))); }
  Scheme Read(ByteReader* reader) {
    const size_t place = reader->ReadU8();
    if (place > seen_ || place >= schemes_.size()) reader->Fail();
    seen_ = std::max(seen_, place + 1);
    return reader->ok() ? schemes_[place] : Scheme();
  }
  bool all_seen() const { return seen_ == schemes_.size(); }

 private:
  size_t Find(Scheme scheme) const {
    return static_cast<size_t>(std::find(schemes_.begin(), schemes_.end(), scheme) - schemes_.begin());
  }
  void Add(Scheme scheme) {
    if (Find(scheme) == schemes_.size()) schemes_.push_back(scheme);
  }

  std::vector<Scheme> schemes_;
  size_t seen_ = 0;  // of those that were read
};

void Write(const TensorDecision& decision, const SchemeNames& schemes, ByteWriter* writer) {
  writer->WriteString(decision.name);
  schemes.Write(decision.scheme, writer);
  writer->WriteU32(static_cast<uint32_t>(decision.offers.size()));
  for (const Offer& offer : decision.offers) {
    schemes.Write(offer.scheme, writer);
    writer->WriteDoubleWithin(offer.bytes, 0, kMostBytes);
    writer->WriteOrNone(offer.seconds, kMostSeconds);
    writer->WriteString(offer.obstacle);
  }
  writer->WriteI64(decision.global_rows);
  writer->WriteString(decision.reason);
  writer->WriteBool(decision.request_refused);
}

TensorDecision ReadDecision(SchemeNames* schemes, ByteReader* reader) {
  TensorDecision decision;
  decision.name = reader->ReadString();
  decision.scheme = schemes->Read(reader);
  const uint32_t offers = reader->ReadCount(kMinOfferBytes);
  for (uint32_t i = 0; i < offers && reader->ok(); ++i) {
    Offer offer;
    offer.scheme = schemes->Read(reader);
    offer.bytes = reader->ReadDoubleWithin(0, kMostBytes);
    offer.seconds = reader->ReadOrNone(kMostSeconds);
    offer.obstacle = reader->ReadString();
    if (decision.OfferOf(offer.scheme) != nullptr) reader->Fail();
    decision.offers.push_back(std::move(offer));
  }
  decision.global_rows = reader->ReadI64();
  if (decision.global_rows < 0) reader->Fail();
  decision.reason = reader->ReadString();
  decision.request_refused = reader->ReadBool();
  return decision;
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
  writer.WriteSeconds(plan.network.skew_seconds);
  writer.WriteBool(plan.network.clamped);
  writer.WriteBool(plan.prediction.known);
  Write(plan.prediction.chosen, &writer);
  Write(plan.prediction.dense, &writer);
  writer.WriteDoubleWithin(plan.prediction.load.allreduce, kLeastLoad, kMostLoad);
  writer.WriteDoubleWithin(plan.prediction.load.allgather, kLeastLoad, kMostLoad);
  const SchemeNames schemes(plan);
  schemes.Write(&writer);
  writer.WriteU32(static_cast<uint32_t>(plan.decisions.size()));
  for (const TensorDecision& decision : plan.decisions) Write(decision, schemes, &writer);
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
  if (out->made_at_step < 0) reader.Fail();
  Read(&reader, &out->network.allreduce);
  Read(&reader, &out->network.allgather);
  out->network.skew_seconds = reader.ReadSeconds();
  out->network.clamped = reader.ReadBool();
  out->prediction.known = reader.ReadBool();
  Read(&reader, &out->prediction.chosen);
  Read(&reader, &out->prediction.dense);
  out->prediction.load.allreduce = reader.ReadDoubleWithin(kLeastLoad, kMostLoad);
  out->prediction.load.allgather = reader.ReadDoubleWithin(kLeastLoad, kMostLoad);
  out->decisions.clear();
  SchemeNames schemes(&reader);
  const uint32_t count = reader.ReadCount(kMinDecisionBytes);
  for (uint32_t i = 0; i < count && reader.ok(); ++i) out->decisions.push_back(ReadDecision(&schemes, &reader));
  if (!schemes.all_seen()) reader.Fail();
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

namespace {

Status DoesNotFit(const std::string& what) {
  return Status::Internal("the plan of rank 0 does not fit this rank: " + what +
                          "; install the same version of poseidon_hvd on every rank");
}

// sent: by parameter, the parts that slices before this one send.
Status CheckSlice(const Plan& plan, const DenseSlice& slice, const std::vector<LocalTensor>& local,
                  std::vector<int>* sent) {
  if (slice.tensors.empty()) return DoesNotFit("a slice without gradients");
  if (slice.parts < 1 || slice.part < 0 || slice.part >= slice.parts) {
    return DoesNotFit("part " + std::to_string(slice.part) + " of " + std::to_string(slice.parts));
  }
  const bool parted = plan.dense_method == DenseMethod::kPriority;
  if (slice.parts > 1 && !parted) {
    return DoesNotFit(std::string("method ") + Name(plan.dense_method) + " sends a gradient in parts");
  }
  if (slice.tensors.size() > 1 && parted) return DoesNotFit("method priority puts gradients together");
  for (int index : slice.tensors) {
    if (index < 0 || static_cast<size_t>(index) >= local.size()) {
      return DoesNotFit("a slice of parameter " + std::to_string(index));
    }
    const std::string& name = local[index].name;
    if (plan.decisions[index].scheme != Scheme::kAllreduce) {
      return DoesNotFit(name + " is in a slice and travels by " + Name(plan.decisions[index].scheme));
    }
    if (slice.parts > std::max<int64_t>(1, NumElements(local[index].shape))) {
      return DoesNotFit(name + " of shape " + ShapeText(local[index].shape) + " in " + std::to_string(slice.parts) +
                        " parts");
    }
    if ((*sent)[index]++ != slice.part) return DoesNotFit(name + " is sent twice, or its parts are out of order");
  }
  return Status::OK();
}

}  // namespace

Status CheckPlan(const Plan& plan, int size, const std::vector<LocalTensor>& local) {
  if (plan.size != size) {
    return DoesNotFit("it is for " + std::to_string(plan.size) + " ranks, there are " + std::to_string(size));
  }
  if (plan.decisions.size() != local.size()) {
    return DoesNotFit("it decides on " + std::to_string(plan.decisions.size()) + " parameters, there are " +
                      std::to_string(local.size()));
  }
  for (size_t i = 0; i < local.size(); ++i) {
    if (plan.decisions[i].name == local[i].name) continue;
    return DoesNotFit("parameter " + std::to_string(i) + " is " + plan.decisions[i].name + " there and " +
                      local[i].name + " here");
  }
  std::vector<int> sent(local.size()), parts(local.size());
  for (const DenseSlice& slice : plan.slices) {
    if (Status status = CheckSlice(plan, slice, local, &sent); !status.ok()) return status;
    for (int index : slice.tensors) {
      if (parts[index] != 0 && parts[index] != slice.parts) {
        return DoesNotFit(local[index].name + " is cut in two ways");
      }
      parts[index] = slice.parts;
    }
  }
  for (size_t i = 0; i < local.size(); ++i) {
    if (sent[i] == parts[i]) continue;
    return DoesNotFit("of " + local[i].name + " " + std::to_string(sent[i]) + " of " + std::to_string(parts[i]) +
                      " parts are sent");
  }
  return Status::OK();
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
