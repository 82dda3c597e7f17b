// Ranks are threads, each with its own engine. The layer is plain loops; expected gradients are the same sums in
// double.
#include "core/schemes/sfb_exchange.h"

#include <algorithm>
#include <limits>
#include <random>

#include "core/model/cost_model.h"
#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

constexpr uint32_t kBoth = kFlagExtraWeight | kFlagExtraBias;
enum Kind : uint64_t { kX, kD, kExtraWeight, kExtraBias };

// What one layer sends in one step: rows and flags of each rank.
struct Step {
  std::vector<int64_t> rows;
  std::vector<uint32_t> flags;
};

// In [-1, 1), with few enough bits to be exact in float32.
double Value(uint64_t layer, uint64_t step, uint64_t rank, Kind kind, uint64_t index) {
  uint64_t z = (((layer * 1009 + step) * 31 + rank) * 7 + kind) * 100003 + index;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 44) / (1 << 19) - 1.0;
}

// scale * (sum over ranks of d^T x, or of the column sums of d, plus the flagged extra parts).
std::vector<double> Reference(FactorLayer::Part part, const FactorLayout& layout, int layer, int step_index,
                              const Step& step) {
  const int64_t n = part == FactorLayer::kWeight ? layout.in_features : 1;
  const uint32_t flag = part == FactorLayer::kWeight ? kFlagExtraWeight : kFlagExtraBias;
  const Kind extra = part == FactorLayer::kWeight ? kExtraWeight : kExtraBias;
  std::vector<double> sums(layout.out_features * n);
  for (size_t rank = 0; rank < step.rows.size(); ++rank) {
    for (int64_t i = 0; i < static_cast<int64_t>(sums.size()); ++i) {
      for (int64_t row = 0; row < step.rows[rank]; ++row) {
        const double d = Value(layer, step_index, rank, kD, row * layout.out_features + i / n);
        sums[i] += part == FactorLayer::kBias ? d : d * Value(layer, step_index, rank, kX, row * n + i % n);
      }
      if ((step.flags[rank] & flag) != 0) sums[i] += Value(layer, step_index, rank, extra, i);
    }
  }
  for (double& sum : sums) sum /= static_cast<double>(step.rows.size());
  return sums;
}

template <typename T>
class PlainLayer final : public FactorLayer {
 public:
  static constexpr DType kDType = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;

  PlainLayer(const FactorLayout& layout, bool has_bias, int layer, int rank, int size)
      : layout_(layout), has_bias_(has_bias), layer_(layer), rank_(rank), size_(size) {
    const int64_t elements[2] = {layout.out_features * layout.in_features, layout.out_features};
    for (Part part : {kWeight, kBias}) {
      gradient[part].assign(elements[part], std::numeric_limits<T>::quiet_NaN());
      extra_[part].resize(elements[part]);
    }
  }

  // The message of this step; the memory is ours.
  Buffer Pack(int step_index, int64_t rows, uint32_t flags) {
    flags_ = flags;
    rebuilds = 0;
    const int64_t n = layout_.in_features, m = layout_.out_features, width = layout_.row_elements();
    message_.assign(MessageRows(rows, flags) * width, T{0});
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < n; ++i) message_[row * width + i] = T(Value(layer_, step_index, rank_, kX, row * n + i));
      for (int64_t i = 0; i < m; ++i)
        message_[row * width + n + i] = T(Value(layer_, step_index, rank_, kD, row * m + i));
    }
    WriteFlag(message_.data(), MessageRows(rows, flags), flags, layout_, kDType);
    for (Part part : {kWeight, kBias}) {
      for (size_t i = 0; i < extra_[part].size(); ++i) {
        extra_[part][i] = T(Value(layer_, step_index, rank_, part == kWeight ? kExtraWeight : kExtraBias, i));
      }
    }
    return {message_.data(), {MessageRows(rows, flags), width}, kDType};
  }

  Buffer AllocateGathered(const std::vector<int64_t>& shape) override {
    gathered_.resize(shape[0] * shape[1]);
    return {gathered_.data(), shape, kDType};
  }
  Status Rebuild(const Buffer& gathered, const bool add[2]) override {
    ++rebuilds;
    if (!rebuild_failure.ok()) return rebuild_failure;
    const auto* rows = static_cast<const T*>(gathered.data);
    const int64_t n = layout_.in_features, width = layout_.row_elements();
    for (Part part : {kWeight, kBias}) {
      if (part == kBias && !has_bias_) continue;
      const int64_t columns = part == kWeight ? n : 1;
      for (int64_t i = 0; i < static_cast<int64_t>(gradient[part].size()); ++i) {
        T sum = 0;
        for (int64_t row = 0; row < gathered.shape[0]; ++row) {
          const T d = rows[row * width + n + i / columns];
          sum += part == kWeight ? d * rows[row * width + i % columns] : d;
        }
        gradient[part][i] = (add[part] ? gradient[part][i] : T{0}) + sum / static_cast<T>(size_);
      }
    }
    return Status::OK();
  }
  Status PrepareExtra(Part part, bool has_extra, Buffer* wire) override {
    if (!prepare_failure[part].ok()) return prepare_failure[part];
    POSEIDON_CHECK_EQ(has_extra, (flags_ & (part == kWeight ? kFlagExtraWeight : kFlagExtraBias)) != 0);
    if (!has_extra) std::fill(extra_[part].begin(), extra_[part].end(), T{0});
    const int64_t m = layout_.out_features, n = layout_.in_features;
    *wire = {extra_[part].data(), part == kWeight ? std::vector<int64_t>{m, n} : std::vector<int64_t>{m}, kDType};
    return Status::OK();
  }
  Status RestoreExtra(Part part) override {
    gradient[part] = extra_[part];
    return Status::OK();
  }
  bool has_bias() const override { return has_bias_; }

  std::vector<T> gradient[2];  // by Part; NaN until rebuilt
  int rebuilds = 0;            // of this step
  Status rebuild_failure;
  Status prepare_failure[2];

 private:
  const FactorLayout layout_;
  const bool has_bias_;
  const int layer_;
  const int rank_;
  const int size_;
  uint32_t flags_ = 0;
  std::vector<T> message_;
  std::vector<T> gathered_;
  std::vector<T> extra_[2];  // by Part; reduced in place
};

// One layer as one rank sees it.
template <typename T>
struct LayerOnRank {
  LayerOnRank(const FactorLayout& layout, bool has_bias, int layer, int rank, int size)
      : layout(layout),
        index(layer),
        rank(rank),
        layer(std::make_shared<PlainLayer<T>>(layout, has_bias, layer, rank, size)) {
    SfbExchange::Options options;
    options.layout = layout;
    options.factor_dtype = PlainLayer<T>::kDType;
    options.size = size;
    options.dense_bytes = AllreduceWireBytes(GradientElements(), PlainLayer<T>::kDType, size);
    exchange = std::make_shared<SfbExchange>("layer" + std::to_string(layer), this->layer, options);
  }

  int64_t GradientElements() const { return layout.out_features * (layout.in_features + (layer->has_bias() ? 1 : 0)); }

  void SetMessage(int step_index, const Step& step) {
    exchange->SetMessage(layer->Pack(step_index, step.rows[rank], step.flags[rank]), step.flags[rank], 0.25);
  }

  // After a Wait that returned OK.
  void CheckResult(int step_index, const Step& step) const {
    const int size = static_cast<int>(step.rows.size());
    int64_t rows = 0, message_rows = 0;
    uint32_t flags = 0;
    for (int r = 0; r < size; ++r) {
      rows += step.rows[r];
      message_rows += MessageRows(step.rows[r], step.flags[r]);
      flags |= step.flags[r];
    }
    POSEIDON_CHECK_EQ(exchange->state(), Exchange::State::kDone);
    POSEIDON_CHECK_EQ(exchange->gathered_flags(), flags);
    POSEIDON_CHECK_EQ(exchange->gathered_rows(), message_rows);
    POSEIDON_CHECK_EQ(layer->rebuilds, 1);

    // A sum of k terms of at most 1 in any order is within k^2 epsilon of the exact one.
    const double tolerance = std::pow(double(rows + size + 2), 2) * std::numeric_limits<T>::epsilon();
    for (FactorLayer::Part part : {FactorLayer::kWeight, FactorLayer::kBias}) {
      if (part == FactorLayer::kBias && !layer->has_bias()) continue;
      const std::vector<double> expected = Reference(part, layout, index, step_index, step);
      for (size_t i = 0; i < expected.size(); ++i) {
        POSEIDON_CHECK_NEAR(static_cast<double>(layer->gradient[part][i]), expected[i], tolerance);
      }
    }

    // The cost model's formula, plus the flag column and the follow-ups, which it leaves out.
    constexpr DType kDType = PlainLayer<T>::kDType;
    double bytes = AllgatherWireBytes(message_rows * layout.row_elements() * sizeof(T), size);
    POSEIDON_CHECK_NEAR(bytes,
                        SfbWireBytes(layout.out_features, layout.in_features, message_rows, kDType, size) +
                            AllgatherWireBytes(message_rows * sizeof(T), size),
                        1e-9 * bytes);
    int64_t collectives = 1;
    if ((flags & kFlagExtraWeight) != 0) {
      bytes += AllreduceWireBytes(layout.out_features * layout.in_features, kDType, size);
      ++collectives;
    }
    if ((flags & kFlagExtraBias) != 0) {
      bytes += AllreduceWireBytes(layout.out_features, kDType, size);
      ++collectives;
    }
    POSEIDON_CHECK_EQ(exchange->wire().bytes_sent, bytes);
    POSEIDON_CHECK_EQ(exchange->wire().collectives, collectives);
    POSEIDON_CHECK_EQ(exchange->wire().dense_bytes, AllreduceWireBytes(GradientElements(), kDType, size));

    const ExchangeTimes& times = exchange->times();
    POSEIDON_CHECK_EQ(times.pack_seconds, 0.25);
    POSEIDON_CHECK(times.enqueued <= times.wire_begin && times.wire_begin <= times.wire_end &&
                   times.wire_end <= times.rebuild_begin && times.rebuild_begin <= times.rebuild_end &&
                   times.rebuild_end <= times.done);
  }

  const FactorLayout layout;
  const int index;
  const int rank;
  const std::shared_ptr<PlainLayer<T>> layer;
  std::shared_ptr<SfbExchange> exchange;
};

// One layer, one exchange per rank, reused for all steps. Every step is checked against the reference on every rank,
// and all ranks bitwise against rank 0.
template <typename T>
void RunSteps(const FactorLayout& layout, bool has_bias, const std::vector<Step>& steps) {
  const int size = static_cast<int>(steps[0].rows.size());
  LocalWorld world(size);
  std::vector<std::vector<std::vector<T>>> gradients(size);  // [rank][2 * step + part]
  RunRanks(size, [&](int rank) {
    LayerOnRank<T> layer(layout, has_bias, 0, rank, size);
    for (size_t s = 0; s < steps.size(); ++s) {
      layer.SetMessage(static_cast<int>(s), steps[s]);
      POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(layer.exchange));
      POSEIDON_REQUIRE_OK(world.engines[rank]->Wait({layer.exchange}));
      layer.CheckResult(static_cast<int>(s), steps[s]);
      gradients[rank].push_back(layer.layer->gradient[0]);
      gradients[rank].push_back(layer.layer->gradient[1]);
    }
  });
  for (int rank = 1; rank < size; ++rank) {
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      POSEIDON_CHECK(
          std::memcmp(gradients[rank][i].data(), gradients[0][i].data(), gradients[0][i].size() * sizeof(T)) == 0);
    }
  }
}

constexpr FactorLayout kLayout{5, 3};

TEST(RowsOfTwoRanks) {
  RunSteps<float>(
      kLayout, true,
      {{{4, 4}, {0, 0}}, {{1, 7}, {0, 0}}, {{0, 3}, {0, 0}}, {{3, 0}, {0, 0}}, {{0, 0}, {0, 0}}, {{2, 2}, {0, 0}}});
}

TEST(RowsOfThreeRanks) {
  RunSteps<float>(kLayout, true,
                  {{{2, 2, 2}, {0, 0, 0}}, {{5, 0, 1}, {0, 0, 0}}, {{0, 0, 0}, {0, 0, 0}}, {{0, 0, 6}, {0, 0, 0}}});
}

TEST(RowsOfFourRanksWithoutBias) {
  RunSteps<float>(
      {7, 2}, false,
      {{{1, 2, 3, 4}, {0, 0, 0, 0}}, {{0, 9, 0, 1}, {kFlagExtraWeight, 0, 0, 0}}, {{1, 1, 1, 1}, {0, 0, 0, 0}}});
}

TEST(Float64AndLayersOfOneFeature) {
  RunSteps<double>(kLayout, true, {{{3, 1, 2}, {0, 0, 0}}, {{0, 1, 0}, {kBoth, 0, 0}}});
  RunSteps<float>({1, 1}, true, {{{3, 1}, {0, 0}}, {{0, 0}, {0, 0}}, {{0, 0}, {0, kBoth}}});
}

TEST(OneRank) { RunSteps<float>(kLayout, true, {{{4}, {0}}, {{0}, {0}}, {{2}, {kBoth}}, {{0}, {kFlagExtraBias}}}); }

TEST(SchemeOfAnEmbedding) {
  SfbExchange::Options options;
  POSEIDON_CHECK_EQ(SfbExchange("w", nullptr, options).scheme(), Scheme::kSfb);
  options.scheme = Scheme::kRowSparse;
  POSEIDON_CHECK_EQ(SfbExchange("w", nullptr, options).scheme(), Scheme::kRowSparse);
}

TEST(ExtraOnOneRankThenNoneInTheNextStep) {
  for (uint32_t flags : {kFlagExtraWeight, kFlagExtraBias, kBoth}) {
    for (size_t flagged = 0; flagged < 3; ++flagged) {
      for (int64_t rows : {3, 0}) {
        Step step{{2, 1, 4}, {0, 0, 0}};
        step.rows[flagged] = rows;
        step.flags[flagged] = flags;
        RunSteps<float>(kLayout, true, {step, {{2, 1, 4}, {0, 0, 0}}, step});
      }
    }
  }
}

TEST(ExtraOnSeveralRanks) {
  RunSteps<float>(kLayout, true,
                  {{{2, 1, 4}, {kBoth, kBoth, kBoth}},
                   {{2, 0, 4}, {kFlagExtraWeight, kFlagExtraBias, 0}},  // all follow up with both
                   {{0, 0, 0}, {0, kFlagExtraBias, kFlagExtraBias}},
                   {{0, 0, 0}, {kBoth, kBoth, kBoth}},
                   {{0, 0, 0}, {0, 0, 0}}});
}

// 8 layers in flight at once, in another random order on every rank and step, some with extra parts: no deadlock, no
// mix-up.
TEST(ManyLayersInRandomOrder) {
  constexpr int kSize = 3;
  constexpr int kLayers = 8;
  constexpr int kSteps = 100;
  std::mt19937 random(7);
  const Step blank{std::vector<int64_t>(kSize), std::vector<uint32_t>(kSize)};
  std::vector<std::vector<Step>> plan(kSteps, std::vector<Step>(kLayers, blank));
  for (auto& layers : plan) {
    for (Step& step : layers) {
      for (int64_t& rows : step.rows) rows = random() % 4;
      for (uint32_t& flags : step.flags) flags = random() % 12 == 0 ? 1 + random() % kBoth : 0;
    }
  }
  LocalWorld world(kSize, std::chrono::microseconds(100));
  std::vector<std::vector<float>> gradients(kSize);  // all layers and steps of a rank
  RunRanks(kSize, [&](int rank) {
    std::vector<LayerOnRank<float>> layers;
    for (int l = 0; l < kLayers; ++l) layers.emplace_back(FactorLayout{1 + l % 4, 4 - l % 3}, true, l, rank, kSize);
    std::mt19937 order(rank);
    std::vector<int> sequence(kLayers);
    for (int l = 0; l < kLayers; ++l) sequence[l] = l;
    for (int s = 0; s < kSteps; ++s) {
      std::shuffle(sequence.begin(), sequence.end(), order);
      std::vector<std::shared_ptr<Exchange>> exchanges;
      for (int l : sequence) {
        layers[l].SetMessage(s, plan[s][l]);
        POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(layers[l].exchange));
        exchanges.push_back(layers[l].exchange);
      }
      POSEIDON_REQUIRE_OK(world.engines[rank]->Wait(exchanges));
      for (int l = 0; l < kLayers; ++l) {
        layers[l].CheckResult(s, plan[s][l]);
        for (const auto& gradient : layers[l].layer->gradient) {
          gradients[rank].insert(gradients[rank].end(), gradient.begin(), gradient.end());
        }
      }
    }
  });
  for (int rank = 1; rank < kSize; ++rank) {
    POSEIDON_REQUIRE(gradients[rank].size() == gradients[0].size());
    POSEIDON_CHECK(std::memcmp(gradients[rank].data(), gradients[0].data(), gradients[0].size() * sizeof(float)) == 0);
  }
}

TEST(FailuresReachEveryRankAndTheNextStepWorks) {
  constexpr int kSize = 2;
  const Step step{{2, 1}, {kFlagExtraWeight, 0}};
  LocalWorld world(kSize);
  std::vector<std::unique_ptr<LayerOnRank<float>>> layers;
  for (int rank = 0; rank < kSize; ++rank) {
    layers.push_back(std::make_unique<LayerOnRank<float>>(kLayout, true, 0, rank, kSize));
  }
  const auto run = [&](const std::function<void(int rank, const Status&)>& check) {
    RunRanks(kSize, [&](int rank) {
      layers[rank]->SetMessage(0, step);
      POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(layers[rank]->exchange));
      check(rank, world.engines[rank]->Wait({layers[rank]->exchange}));
    });
  };
  for (const char* name : {"layer0", "layer0.extra.weight"}) {
    world.cluster.FailNext(name, Status::Unavailable("a peer died"));
    run([&](int rank, const Status& status) {
      POSEIDON_CHECK_EQ(status.message(), std::string("layer0: a peer died"));
      POSEIDON_CHECK_EQ(layers[rank]->layer->rebuilds, 0);
    });
  }
  layers[1]->layer->rebuild_failure = Status::Internal("out of memory");
  run([&](int rank, const Status& status) {
    POSEIDON_CHECK_EQ(status.message(), std::string(rank == 1 ? "layer0: out of memory" : ""));
  });
  layers[1]->layer->rebuild_failure = Status::OK();
  run([&](int rank, const Status& status) {
    POSEIDON_CHECK_OK(status);
    layers[rank]->CheckResult(0, step);
  });
}

TEST(FailedSubmissionLeavesNothingInFlight) {
  constexpr int kSize = 2;
  LocalWorld world(kSize);
  LayerOnRank<float> layer(kLayout, true, 0, 0, kSize);
  LayerOnRank<float> twin(kLayout, true, 0, 0, kSize);  // of the same name, on the same rank
  LayerOnRank<float> partner(kLayout, true, 0, 1, kSize);
  const Step step{{2, 3}, {0, kFlagExtraBias}};
  for (auto* one : {&layer, &twin, &partner}) one->SetMessage(0, step);
  POSEIDON_REQUIRE_OK(world.engines[0]->Submit(layer.exchange));
  POSEIDON_CHECK_EQ(world.engines[0]->Submit(twin.exchange).code(), StatusCode::kInvalidArgument);
  POSEIDON_CHECK_EQ(twin.exchange->state(), Exchange::State::kIdle);
  for (auto* one : {&layer, &twin}) {  // the twin can be sent once the name is free
    if (one == &twin) {
      partner.SetMessage(0, step);
      POSEIDON_REQUIRE_OK(world.engines[0]->Submit(twin.exchange));
    }
    POSEIDON_REQUIRE_OK(world.engines[1]->Submit(partner.exchange));
    POSEIDON_REQUIRE_OK(world.engines[0]->Wait({one->exchange}));
    POSEIDON_REQUIRE_OK(world.engines[1]->Wait({partner.exchange}));
    one->CheckResult(0, step);
  }
}

TEST(LayersOfDifferentWidthFailOnAllRanks) {
  LocalWorld world(2);
  RunRanks(2, [&](int rank) {
    LayerOnRank<float> layer({4 + rank, 3}, true, 0, rank, 2);
    layer.SetMessage(0, {{1, 1}, {0, 0}});
    POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(layer.exchange));
    POSEIDON_CHECK_EQ(world.engines[rank]->Wait({layer.exchange}).code(), StatusCode::kInvalidArgument);
    POSEIDON_CHECK_EQ(layer.layer->rebuilds, 0);
  });
}

// A rank that cannot prepare one extra part sends none of them.
TEST(FailureToPrepareAnExtraPart) {
  constexpr int kSize = 2;
  LocalWorld world(kSize);
  RunRanks(kSize, [&](int rank) {
    LayerOnRank<float> layer(kLayout, true, 0, rank, kSize);
    layer.SetMessage(0, {{1, 1}, {kBoth, 0}});
    if (rank == 0) layer.layer->prepare_failure[FactorLayer::kBias] = Status::Internal("no memory");
    POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(layer.exchange));
    const Status status = world.engines[rank]->Wait({layer.exchange});
    if (rank == 0) {
      POSEIDON_CHECK_EQ(status.message(), std::string("layer0: no memory"));
      world.cluster.Shutdown();  // or rank 1 would wait for ever
    } else {
      POSEIDON_CHECK_EQ(status.code(), StatusCode::kAborted);
    }
  });
  POSEIDON_CHECK_EQ(world.cluster.executed(), std::vector<std::string>{"layer0"});
}

TEST(StatsAddUp) {
  const auto at = [](int seconds) { return Clock::time_point{} + std::chrono::seconds(seconds); };
  ExchangeTimes gathered;
  gathered.pack_seconds = 0.5;
  gathered.enqueued = at(10);
  gathered.wire_begin = at(12);
  gathered.wire_end = at(15);
  gathered.rebuild_begin = at(19);
  gathered.rebuild_end = at(24);
  ExchangeTimes reduced;  // no start of the transfer, nothing to rebuild
  reduced.enqueued = at(30);
  reduced.wire_end = at(36);
  SessionStats stats;
  SchemeStats& sums = stats.of(Scheme::kSfb);
  sums.Add(gathered, {100, 2, 400}, 2);
  sums.Add(reduced, {10, 1, 10}, 1);
  POSEIDON_CHECK_EQ(sums.tensors, int64_t{3});
  POSEIDON_CHECK_EQ(sums.collectives, int64_t{3});
  POSEIDON_CHECK_EQ(sums.bytes_sent, 110.0);
  POSEIDON_CHECK_EQ(sums.dense_bytes, 410.0);
  POSEIDON_CHECK_EQ(sums.pack_seconds, 0.5);
  POSEIDON_CHECK_EQ(sums.queue_seconds, 2.0);
  POSEIDON_CHECK_EQ(sums.wire_seconds, 9.0);
  POSEIDON_CHECK_EQ(sums.handoff_seconds, 4.0);
  POSEIDON_CHECK_EQ(sums.rebuild_seconds, 5.0);
  POSEIDON_CHECK_EQ(stats.of(Scheme::kAllreduce).tensors, int64_t{0});
}

}  // namespace
}  // namespace poseidon
