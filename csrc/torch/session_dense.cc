// Session's gradients that are allreduced: in slices as the plan lays them out (core/plan/dense_layout.h), or one by
// one for Horovod to put together.
#include <algorithm>
#include <utility>

#include "core/model/cost_model.h"
#include "torch/dtypes.h"
#include "torch/routes/grad_place.h"
#include "torch/session.h"
#include "torch/status_error.h"

namespace poseidon {

namespace {

// Of parts, with method kPriority: one may wait behind the one that travels.
constexpr double kCreditInThetas = 2;
// Of KeepApart, for gradients that travel alone; slices are numbered from 0.
constexpr int kFirstNumberAlone = 1 << 16;

}  // namespace

bool Session::GoesByTime() const { return poseidon::GoesByTime(options_.policy, options_.dense.method); }

bool Session::MayShare(const Parameter& p) const {
  return p.group < 0 && !p.sparse && options_.compression != CompressionKind::kPython &&
         at::isFloatingType(p.tensor.scalar_type()) && p.tensor.numel() > 0;
}

at::ScalarType Session::DenseWireType(const Parameter& p) const {
  return ToScalarType(wire_format_.Reduced(ToDType(GradType(p.tensor))));
}

std::vector<bool> Session::WhichMayShare(const MergedProfile& profile) const {
  std::vector<bool> may_share;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // A gradient that some rank does not complete in backward would keep those that share its message from being
    // reduced there.
    const MergedTensor& merged = profile.tensors[i];
    may_share.push_back(MayShare(parameters_[i]) && !merged.sparse &&
                        (merged.everywhere || !options_.reduce_in_backward));
  }
  return may_share;
}

// From the plan in force.
void Session::MakeSlices() {
  for (Parameter& p : parameters_) {
    const auto in_flight = [](const auto& exchange) {
      return exchange && exchange->state() == Exchange::State::kInFlight;
    };
    bool source_in_use = in_flight(p.exchange);
    for (int position : p.parts) source_in_use = source_in_use || in_flight(parts_[position].exchange);
    if (source_in_use) p.source = NewSource(p);  // left in flight by Reset: its buffers stay its own
    p.exchange = nullptr;                        // it has the factor that the old layout gave it
    p.slice = p.slot = -1;
    p.parted = nullptr;
    p.parts.clear();
  }
  slices_.clear();
  parts_.clear();
  sender_ = nullptr;
  for (const DenseSlice& slice : plan_.slices) {
    if (plan_.dense_method == DenseMethod::kPriority) {
      AddPart(slice);
      continue;
    }
    const int number = static_cast<int>(slices_.size());
    slices_.push_back({slice.tensors, nullptr, nullptr});
    for (size_t slot = 0; slot < slice.tensors.size(); ++slot) {
      Parameter& p = parameters_[slice.tensors[slot]];
      p.slice = number;
      p.slot = static_cast<int>(slot);
    }
  }
  if (parts_.empty()) return;
  std::vector<OrderedSender::Item> order;
  auto theta = static_cast<double>(options_.dense.theta);  // where it is too small parts are larger
  for (const Part& part : parts_) {
    order.push_back({part.exchange, part.bytes});
    theta = std::max(theta, part.bytes);
  }
  sender_ = std::make_shared<OrderedSender>(engine_.get(), kCreditInThetas * theta, std::move(order));
  sender_->Attach();
}

void Session::AddPart(const DenseSlice& slice) {
  Parameter& p = parameters_[slice.tensors.front()];
  if (!p.parted) p.parted = std::make_shared<GradParts>(p.source, slice.parts);
  const DType wire = ToDType(DenseWireType(p));
  const std::string name = WireName("part", p.name + "." + std::to_string(slice.part));
  Part part;
  part.bytes = static_cast<double>(p.tensor.numel() * SizeOf(wire)) / slice.parts;
  part.exchange = std::make_shared<DenseExchange>(
      name, std::vector<DenseExchange::Member>{{name, p.parted->Part(slice.part)}},
      engine_->transport().KeepApart(options_.reduction, wire, static_cast<int>(parts_.size())), options_.process_set,
      options_.size);
  p.parts.push_back(static_cast<int>(parts_.size()));
  parts_.push_back(std::move(part));
}

// A complete gradient goes its planned way. fresh: autograd has made it in this pass.
void Session::SendByPlan(Parameter& p, bool fresh) {
  if (!p.parts.empty()) {
    SendParts(p);
  } else if (SharedSliceOf(p) != nullptr) {
    Slice& slice = slices_[p.slice];
    ThrowIfError(PoolOf(slice).Fill(static_cast<size_t>(p.slot), /*visible=*/true, fresh));
    if (slice.pool->full()) SendSlice(slice);
  } else {
    SendDense(p);
  }
}

const Session::Slice* Session::SharedSliceOf(const Parameter& p) const {
  return p.slice >= 0 && slices_[p.slice].members.size() > 1 ? &slices_[p.slice] : nullptr;
}

// Also before there is a plan: what Horovod fuses depends on when it looks, and with it the order of sums and their
// last bits.
Reduction Session::ReductionOf(const Parameter& p) const {
  if (options_.dense.method == DenseMethod::kFused || options_.compression == CompressionKind::kPython)
    return options_.reduction;
  const int number =
      SharedSliceOf(p) != nullptr ? p.slice : kFirstNumberAlone + static_cast<int>(&p - parameters_.data());
  return engine_->transport().KeepApart(options_.reduction, ToDType(DenseWireType(p)), number);
}

GradPool& Session::PoolOf(Slice& slice) {
  const Parameter& first = parameters_[slice.members.front()];
  // The model may have been converted since.
  if (slice.pool && (slice.pool->wire_type() == DenseWireType(first) || !slice.pool->empty())) return *slice.pool;
  std::vector<std::string> names;
  std::vector<at::Tensor> params;
  for (int index : slice.members) {
    names.push_back(parameters_[index].name);
    params.push_back(parameters_[index].tensor);
  }
  const std::string others = "+" + std::to_string(slice.members.size() - 1);
  slice.pool = std::make_shared<GradPool>(first.name + others, names, params, DenseWireType(first));
  const std::string name = WireName("slice", first.name + others);
  slice.exchange = std::make_shared<DenseExchange>(name, std::vector<DenseExchange::Member>{{name, slice.pool}},
                                                   ReductionOf(first), options_.process_set, options_.size);
  return *slice.pool;
}

void Session::SendSlice(Slice& slice) {
  Submit(slice.exchange, slice.members);
  slice.sent = true;
  for (int index : slice.members) parameters_[index].counter.MarkSent();
}

// In synchronize(): with zeros for what is missing.
void Session::CompleteSlice(Slice& slice) {
  GradPool& pool = PoolOf(slice);
  for (size_t slot = 0; slot < slice.members.size(); ++slot) {
    if (!pool.filled(slot)) ThrowIfError(pool.Fill(slot, /*visible=*/parameters_[slice.members[slot]].active));
  }
  SendSlice(slice);
}

void Session::SendParts(Parameter& p) {
  ThrowIfError(p.parted->Prepare());
  for (int position : p.parts) {
    const auto& exchange = parts_[position].exchange;
    ThrowIfFailed(engine_->Admit(exchange));
    in_flight_.push_back({exchange, {static_cast<int>(&p - parameters_.data())}});
    sender_->Ready(static_cast<size_t>(position));
  }
  p.counter.MarkSent();
}

void Session::CountSlice(const DenseSource& source, int64_t bytes, int64_t messages) {
  stats_.dense_messages += messages;
  stats_.dense_copied_bytes += source.copied_bytes();
  stats_.dense_in_place_bytes += bytes - source.copied_bytes();
}

// The step is over, or abandoned.
void Session::EndStepOfSlices() {
  for (Slice& slice : slices_) {
    slice.sent = false;
    if (slice.exchange &&
        slice.exchange->state() == Exchange::State::kInFlight) {  // left by Reset: it keeps its buffer
      slice.exchange = nullptr;
      slice.pool = nullptr;
    } else if (slice.pool) {
      slice.pool->DropStep();
    }
  }
  const bool parts_in_flight = std::any_of(parts_.begin(), parts_.end(), [](const Part& part) {
    return part.exchange->state() == Exchange::State::kInFlight;
  });
  if (parts_in_flight) {
    MakeSlices();
  } else if (sender_) {
    sender_->Reset();
  }
}

}  // namespace poseidon
