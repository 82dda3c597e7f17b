#include "core/model/network_calibration.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>
#include <utility>

#include "core/base/median.h"
#include "core/engine/gather_bytes.h"
#include "core/model/measurements.h"

namespace poseidon {
namespace {

constexpr int64_t kFirstBytes = int64_t{1} << 12;
constexpr int64_t kLastBytes = int64_t{1} << 24;
constexpr int kGrowth = 8;  // from size to size
constexpr int kMostTrials = 5;
constexpr double kShortSeconds = 0.02;  // below it a size is tried kMostTrials times, else twice
// Until a size takes so many times as long as the smallest, the time is mostly alpha and tells little of beta: then the
// budget may be exceeded so many times.
constexpr double kTellingRatio = 5;
constexpr double kBudgetsUntilThen = 2.5;

// One collective of a given size, timed by the engine's own marks.
class Probe final : public Exchange {
 public:
  Probe(std::string name, Scheme scheme, int64_t elements, int process_set)
      : Exchange(std::move(name), scheme), process_set_(process_set), data_(elements) {}

  double seconds() const { return SecondsBetween(times().enqueued, times().done); }

 protected:
  Status Begin(Engine& engine) override {
    const Buffer buffer{data_.data(), {static_cast<int64_t>(data_.size())}, DType::kFloat32};
    Status status;
    if (scheme() == Scheme::kAllreduce) {
      status = engine.transport().Allreduce(name(), buffer, Reduction{ReduceOp::kSum}, process_set_,
                                            engine.CompletionOf(*this));
    } else {
      auto allocate = [self = std::static_pointer_cast<Probe>(shared_from_this())](const std::vector<int64_t>& shape) {
        self->gathered_.resize(shape[0]);
        return Buffer{self->gathered_.data(), shape, DType::kFloat32};
      };
      const char* remedy = "Give the network's costs by network= or POSEIDON_PROFILE.";
      status = engine.transport().Allgather(name(), buffer,
                                            engine.AllocatorOf(*this, buffer.dtype, remedy, std::move(allocate)),
                                            process_set_, engine.CompletionOf(*this));
    }
    if (!status.ok()) engine.CancelCompletion(*this);
    return status;
  }
  Status Advance(Engine&, Progress* progress) override {
    *progress = Progress::kDone;
    return Status::OK();
  }
  // As the exchanges that it stands for: what is gathered goes on to the engine thread.
  bool cheap_advance() const override { return scheme() == Scheme::kAllreduce; }

 private:
  const int process_set_;
  std::vector<float> data_;
  std::vector<float> gathered_;
};

Status ShareDurations(Engine& engine, const CalibrationOptions& options, const std::string& name,
                      const std::vector<double>& mine, double bytes, std::vector<Trial>* trials) {
  std::vector<std::vector<uint8_t>> gathered;
  Status status = GatherBytes(engine, name, options.process_set, options.size, EncodeDurations(mine), &gathered);
  if (!status.ok()) return status;
  const size_t first = trials->size();
  for (size_t i = 0; i < mine.size(); ++i) trials->push_back({bytes, std::vector<double>(gathered.size())});
  for (size_t rank = 0; rank < gathered.size(); ++rank) {
    std::vector<double> seconds;
    status = DecodeDurations(gathered[rank], mine.size(), &seconds);
    if (!status.ok()) {
      return Status::Internal("rank " + std::to_string(rank) + " measured other collectives: " + status.message());
    }
    for (size_t i = 0; i < seconds.size(); ++i) (*trials)[first + i].seconds_by_rank[rank] = seconds[i];
  }
  return Status::OK();
}

Status MeasureKind(Engine& engine, const CalibrationOptions& options, Scheme scheme, std::vector<Trial>* trials) {
  const std::string prefix = options.name_prefix + (scheme == Scheme::kAllreduce ? ".allreduce." : ".allgather.");
  double spent = 0;
  double smallest = 0;
  int repeats = kMostTrials;
  for (int64_t bytes = kFirstBytes; bytes <= kLastBytes; bytes *= kGrowth) {
    // Of an allgather each rank contributes its share.
    int64_t elements = bytes / static_cast<int64_t>(sizeof(float));
    if (scheme != Scheme::kAllreduce) elements = std::max<int64_t>(1, elements / options.size);
    const int64_t counted =
        elements * static_cast<int64_t>(sizeof(float)) * (scheme == Scheme::kAllreduce ? 1 : options.size);
    auto probe = std::make_shared<Probe>(prefix + std::to_string(bytes), scheme, elements, options.process_set);
    std::vector<double> mine;
    for (int i = 0; i <= repeats; ++i) {
      Status status = engine.Submit(probe);
      if (status.ok()) status = engine.Wait({probe});
      if (!status.ok()) return status;
      if (i > 0) mine.push_back(probe->seconds());  // the first touches memory, and its name is new to the transport
    }
    Status status = ShareDurations(engine, options, prefix + "durations", mine, static_cast<double>(counted), trials);
    if (!status.ok()) return status;
    // From what all ranks know alike: what this size took, and what the next would.
    std::vector<double> took;
    for (size_t i = trials->size() - mine.size(); i < trials->size(); ++i) {
      const auto& seconds = (*trials)[i].seconds_by_rank;
      took.push_back(*std::min_element(seconds.begin(), seconds.end()));
    }
    const double typical = Median(took);
    if (bytes == kFirstBytes) smallest = typical;
    spent += std::accumulate(took.begin(), took.end(), typical);  // the first, untimed one too
    const double next = smallest + std::max(0.0, typical - smallest) * kGrowth;
    repeats = next < kShortSeconds ? kMostTrials : 2;
    const double budgets = typical < kTellingRatio * smallest ? kBudgetsUntilThen : 1;
    if (spent + next * (repeats + 1) > budgets * options.budget_seconds) break;
  }
  return Status::OK();
}

}  // namespace

Status MeasureNetwork(Engine& engine, const CalibrationOptions& options, NetworkModel* out) {
  std::vector<Trial> reduced, gathered;
  Status status = MeasureKind(engine, options, Scheme::kAllreduce, &reduced);
  if (status.ok()) status = MeasureKind(engine, options, Scheme::kSfb, &gathered);
  if (!status.ok()) return status;
  const AlphaBetaFit reduce = FitAlphaBeta(reduced);
  const AlphaBetaFit gather = FitAlphaBeta(gathered);
  out->allreduce = reduce.model;
  out->allgather = gather.model;
  out->skew_seconds = std::max(reduce.skew_seconds, gather.skew_seconds);
  out->clamped = reduce.clamped || gather.clamped;
  return Status::OK();
}

}  // namespace poseidon
