#include "core/plan/dense_layout.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <utility>

#include "core/base/bounds.h"
#include "core/base/named.h"

namespace poseidon {

namespace {

// That share a message: elements in it are counted in 31 bits.
constexpr double kMostSharedBytes = 1 << 30;
constexpr double kLeastPart = 8;  // bytes: an element of the widest dtype

bool HasTheta(DenseMethod method) { return method == DenseMethod::kLazy || method == DenseMethod::kPriority; }

std::vector<DenseTensor> InBounds(std::vector<DenseTensor> tensors) {
  for (DenseTensor& tensor : tensors) {
    tensor.bytes = Bounded(tensor.bytes, 0, kMostBytes);
    tensor.ready = Bounded(tensor.ready, 0, kMostSeconds);
  }
  return tensors;
}

AlphaBeta InBounds(const AlphaBeta& model) {
  return {Bounded(model.alpha, 0, kMostSeconds), Bounded(model.beta, 0, kMostSeconds)};
}

// Indices into `tensors` by kind; within a kind in the order given.
std::map<uint8_t, std::vector<size_t>> ByKind(const std::vector<DenseTensor>& tensors) {
  std::map<uint8_t, std::vector<size_t>> kinds;
  for (size_t i = 0; i < tensors.size(); ++i) kinds[tensors[i].kind].push_back(i);
  return kinds;
}

}  // namespace

const char* Name(DenseMethod method) {
  switch (method) {
    case DenseMethod::kFused:
      return "horovod";
    case DenseMethod::kBsp:
      return "bsp";
    case DenseMethod::kWfbp:
      return "wfbp";
    case DenseMethod::kMerged:
      return "merged";
    case DenseMethod::kPriority:
      return "priority";
    case DenseMethod::kLazy:
      return "lazy";
    case DenseMethod::kAuto:
      return "auto";
  }
  return "?";
}

Status ParseDense(const std::string& text, DenseSettings* out) {
  const size_t colon = text.find(':');
  DenseSettings settings;
  const Status status =
      ParseNamed<DenseMethod>("dense method", text.substr(0, colon),
                              {DenseMethod::kAuto, DenseMethod::kFused, DenseMethod::kBsp, DenseMethod::kWfbp,
                               DenseMethod::kMerged, DenseMethod::kPriority, DenseMethod::kLazy},
                              &settings.method);
  if (!status.ok()) return status;
  if (colon != std::string::npos) {
    const std::string number = text.substr(colon + 1);
    char* end = nullptr;
    const double theta = std::strtod(number.c_str(), &end);
    const bool whole = !number.empty() && end == number.c_str() + number.size();
    if (!HasTheta(settings.method) || !whole || !IsWithin(theta, 1, 1e12)) {
      return Status::InvalidArgument("'" + text +
                                     "': only lazy and priority take a number, of bytes, from 1 to 1e12: lazy:4194304");
    }
    settings.theta = static_cast<int64_t>(theta);
  }
  *out = settings;
  return Status::OK();
}

std::vector<DenseSlice> LayOutLazily(const std::vector<DenseTensor>& tensors, double theta, double alone) {
  std::vector<DenseSlice> slices;
  for (const auto& [kind, members] : ByKind(tensors)) {
    DenseSlice open;
    double bytes = 0;
    for (size_t i : members) {
      if (tensors[i].bytes >= alone) {
        slices.push_back({{tensors[i].index}});
        continue;
      }
      if (bytes > 0 && bytes + tensors[i].bytes > kMostSharedBytes) {
        slices.push_back(std::exchange(open, {}));
        bytes = 0;
      }
      open.tensors.push_back(tensors[i].index);
      bytes += tensors[i].bytes;
      if (bytes < theta) continue;
      slices.push_back(std::move(open));
      open = {};
      bytes = 0;
    }
    if (!open.tensors.empty()) slices.push_back(std::move(open));
  }
  return slices;
}

std::vector<DenseSlice> LayOutLazily(const std::vector<DenseTensor>& tensors, double theta) {
  return LayOutLazily(tensors, theta, theta);
}

std::vector<DenseSlice> LayOutMerged(const std::vector<DenseTensor>& given, const AlphaBeta& network) {
  const std::vector<DenseTensor> tensors = InBounds(given);
  const AlphaBeta allreduce = InBounds(network);
  std::vector<DenseSlice> slices;
  for (const auto& [kind, members] : ByKind(tensors)) {
    double channel_free = 0;
    DenseSlice open;
    double bytes = 0;
    for (size_t at = 0; at < members.size(); ++at) {
      const DenseTensor& tensor = tensors[members[at]];
      open.tensors.push_back(tensor.index);
      bytes += tensor.bytes;
      const double start = std::max(channel_free, tensor.ready);
      const DenseTensor* next = at + 1 < members.size() ? &tensors[members[at + 1]] : nullptr;
      if (next != nullptr && next->ready - start < allreduce.alpha && bytes + next->bytes <= kMostSharedBytes) continue;
      channel_free = start + allreduce.Seconds(bytes);
      slices.push_back(std::move(open));
      open = {};
      bytes = 0;
    }
  }
  return slices;
}

std::vector<DenseSlice> LayOutByPriority(const std::vector<DenseTensor>& given, double theta,
                                         const AlphaBeta& network) {
  const std::vector<DenseTensor> tensors = InBounds(given);
  const AlphaBeta allreduce = InBounds(network);
  double bytes = 0;
  for (const DenseTensor& tensor : tensors) bytes += tensor.bytes;
  const double part = std::max({kLeastPart, bytes / kMostParts, theta});
  struct Left {
    size_t tensor;
    int parts;
    int sent = 0;
  };
  std::vector<Left> left;
  for (size_t i = 0; i < tensors.size(); ++i) {
    left.push_back({i, static_cast<int>(std::max(1.0, std::ceil(tensors[i].bytes / part)))});
  }
  std::vector<DenseSlice> slices;
  double now = 0;
  while (!left.empty()) {
    // The last one in the order of backward that is complete; if none is, time goes on to the first that will be.
    auto next = left.end();
    double first_ready = std::numeric_limits<double>::infinity();
    for (auto it = left.begin(); it != left.end(); ++it) {
      first_ready = std::min(first_ready, tensors[it->tensor].ready);
      if (tensors[it->tensor].ready <= now) next = it;
    }
    if (next == left.end()) {
      now = first_ready;
      continue;
    }
    const DenseTensor& tensor = tensors[next->tensor];
    slices.push_back({{tensor.index}, next->sent, next->parts});
    now += allreduce.Seconds(tensor.bytes / next->parts);
    if (++next->sent == next->parts) left.erase(next);
  }
  return slices;
}

std::vector<DenseSlice> LayOut(const DenseSettings& settings, const std::vector<DenseTensor>& tensors,
                               const AlphaBeta& allreduce) {
  switch (settings.method) {
    case DenseMethod::kFused:
      return {};
    case DenseMethod::kBsp:
      return LayOutLazily(tensors, std::numeric_limits<double>::infinity());
    case DenseMethod::kWfbp:
      return LayOutLazily(tensors, 0);
    case DenseMethod::kMerged:
      return LayOutMerged(tensors, allreduce);
    case DenseMethod::kPriority:
      return LayOutByPriority(tensors, static_cast<double>(settings.theta), allreduce);
    case DenseMethod::kLazy:
    case DenseMethod::kAuto:
      return LayOutLazily(tensors, static_cast<double>(settings.theta));
  }
  return {};
}

std::vector<std::vector<DenseSlice>> CandidateLayouts(const std::vector<DenseTensor>& tensors,
                                                      const std::vector<AlphaBeta>& networks, const Tuning& tuning) {
  std::vector<std::vector<DenseSlice>> layouts = {LayOutLazily(tensors, 0)};
  for (const AlphaBeta& network : networks) layouts.push_back(LayOutMerged(tensors, network));
  std::vector<double> thetas;
  for (double theta = tuning.first_theta; theta <= tuning.last_theta; theta *= tuning.theta_growth)
    thetas.push_back(theta);
  thetas.push_back(std::numeric_limits<double>::infinity());
  for (size_t alone = 0; alone < thetas.size(); ++alone) {
    for (size_t theta = alone; theta < thetas.size(); ++theta)
      layouts.push_back(LayOutLazily(tensors, thetas[theta], thetas[alone]));
  }
  return layouts;
}

}  // namespace poseidon
