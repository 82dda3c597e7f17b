#include "core/schemes/dense_exchange.h"

#include <algorithm>

#include "core/model/cost_model.h"
#include "horovod/traits.h"
#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

// A gradient in float64 that travels as it is, or as a float32 copy.
class PlainSource final : public DenseSource {
 public:
  PlainSource(std::vector<double> values, bool copy) : gradient(std::move(values)), copy_(copy) {}

  Status PrepareWire(Buffer* wire) override {
    if (!prepare_failure.ok()) return prepare_failure;
    const int64_t elements = static_cast<int64_t>(gradient.size());
    copied_.assign(gradient.begin(), gradient.end());
    *wire = copy_ ? Buffer{copied_.data(), {elements}, DType::kFloat32}
                  : Buffer{gradient.data(), {elements}, DType::kFloat64};
    return Status::OK();
  }
  bool needs_restore() const override { return copy_; }
  Status RestoreFromWire() override {
    ++restores;
    restored_on = std::this_thread::get_id();
    if (!restore_failure.ok()) return restore_failure;
    gradient.assign(copied_.begin(), copied_.end());
    return Status::OK();
  }

  std::vector<double> gradient;
  int restores = 0;
  std::thread::id restored_on;
  Status prepare_failure;
  Status restore_failure;

 private:
  const bool copy_;
  std::vector<float> copied_;
};

// Exact in float32, and so are all sums over few ranks: results are compared with ==.
double Value(int rank, int member, int step, size_t i) {
  return ((rank * 37 + member * 11 + step * 5 + static_cast<int>(i) * 3) % 41 - 20) / 8.0;
}
std::vector<double> Gradient(int rank, int member, int step) {
  std::vector<double> values(3 + member);
  for (size_t i = 0; i < values.size(); ++i) values[i] = Value(rank, member, step, i);
  return values;
}
std::vector<double> Sum(int size, int member, int step, double factor) {
  std::vector<double> sums(3 + member);
  for (size_t i = 0; i < sums.size(); ++i) {
    for (int rank = 0; rank < size; ++rank) sums[i] += Value(rank, member, step, i);
    sums[i] *= factor;
  }
  return sums;
}

// `copies` says which members travel as a copy.
struct Gradients {
  Gradients(const std::vector<bool>& copies, const Reduction& reduction, int size) {
    std::vector<DenseExchange::Member> members;
    for (size_t i = 0; i < copies.size(); ++i) {
      sources.push_back(std::make_shared<PlainSource>(std::vector<double>{}, copies[i]));
      members.push_back({"member" + std::to_string(i), sources.back()});
    }
    exchange = std::make_shared<DenseExchange>("gradients", std::move(members), reduction, 0, size);
  }
  void Fill(int rank, int step) {
    for (size_t i = 0; i < sources.size(); ++i) sources[i]->gradient = Gradient(rank, static_cast<int>(i), step);
  }

  std::vector<std::shared_ptr<PlainSource>> sources;
  std::shared_ptr<DenseExchange> exchange;
};

void CheckSteps(int size, const std::vector<bool>& copies, const Reduction& reduction, double factor) {
  constexpr int kSteps = 3;
  const bool restores = std::count(copies.begin(), copies.end(), true) > 0;
  LocalWorld world(size);
  RunRanks(size, [&](int rank) {
    Gradients gradients(copies, reduction, size);
    POSEIDON_CHECK_EQ(gradients.exchange->gradients(), static_cast<int64_t>(copies.size()));
    for (int step = 0; step < kSteps; ++step) {
      gradients.Fill(rank, step);
      POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(gradients.exchange));
      POSEIDON_REQUIRE_OK(world.engines[rank]->Wait({gradients.exchange}));
      double bytes = 0;
      for (size_t i = 0; i < copies.size(); ++i) {
        const PlainSource& source = *gradients.sources[i];
        POSEIDON_CHECK_EQ(source.gradient, Sum(size, static_cast<int>(i), step, factor));
        POSEIDON_CHECK_EQ(source.restores, copies[i] ? step + 1 : 0);
        POSEIDON_CHECK(source.restored_on != std::this_thread::get_id());
        bytes += AllreduceWireBytes(source.gradient.size(), copies[i] ? DType::kFloat32 : DType::kFloat64, size);
      }
      const WireCount& wire = gradients.exchange->wire();
      POSEIDON_CHECK_EQ(wire.bytes_sent, bytes);
      POSEIDON_CHECK_EQ(wire.dense_bytes, bytes);
      POSEIDON_CHECK_EQ(wire.collectives, static_cast<int64_t>(copies.size()));
      const ExchangeTimes& times = gradients.exchange->times();
      POSEIDON_CHECK(times.enqueued <= times.wire_end && times.wire_end <= times.done);
      POSEIDON_CHECK_EQ(times.rebuild_begin != Clock::time_point{}, restores);  // else no hop to the engine thread
      POSEIDON_CHECK_EQ(times.rebuild_end != Clock::time_point{}, restores);
    }
  });
  POSEIDON_CHECK_EQ(world.cluster.operations(), kSteps * copies.size());
}

TEST(SingleInPlace) {
  CheckSteps(2, {false}, {ReduceOp::kSum, 1.0, 1.0}, 1.0);
  CheckSteps(4, {false}, {ReduceOp::kAverage, 1.0, 1.0}, 0.25);
  CheckSteps(3, {false}, {ReduceOp::kSum, 0.5, 4.0}, 2.0);
  CheckSteps(1, {false}, {ReduceOp::kAverage, 1.0, 1.0}, 1.0);
}

TEST(SingleWithRestore) { CheckSteps(4, {true}, {ReduceOp::kAverage, 2.0, 1.0}, 0.5); }

TEST(Group) {
  CheckSteps(3, {false, false, false}, {ReduceOp::kSum, 1.0, 1.0}, 1.0);
  CheckSteps(2, {true, true}, {ReduceOp::kAverage, 1.0, 1.0}, 0.5);
  CheckSteps(2, {false, true, false, true}, {ReduceOp::kAverage, 1.0, 1.0}, 0.5);  // only two are restored
}

TEST(FailureOfASourceSendsNothing) {
  LocalWorld world(1);
  Gradients gradients({false, true}, {}, 1);
  gradients.Fill(0, 0);
  gradients.sources[1]->prepare_failure = Status::InvalidArgument("not contiguous");
  POSEIDON_CHECK_EQ(world.engines[0]->Submit(gradients.exchange).message(), std::string("gradients: not contiguous"));
  POSEIDON_CHECK_EQ(gradients.exchange->state(), Exchange::State::kIdle);
  POSEIDON_CHECK_EQ(world.cluster.operations(), size_t{0});
  gradients.sources[1]->prepare_failure = Status::OK();
  POSEIDON_REQUIRE_OK(world.engines[0]->Submit(gradients.exchange));
  POSEIDON_CHECK_OK(world.engines[0]->Wait({gradients.exchange}));
  POSEIDON_CHECK_EQ(gradients.sources[1]->gradient, Sum(1, 1, 0, 1.0));
}

// The transport refuses a name that is in flight: the whole group stays out, and can be sent later.
TEST(SubmissionErrorOfOneAndOfAGroup) {
  for (size_t members : {size_t{1}, size_t{3}}) {
    LocalWorld world(2);
    double held = 0;
    const std::string name = "member" + std::to_string(members - 1);
    const auto hold = [&](int rank) {
      POSEIDON_REQUIRE_OK(world.cluster.transport(rank)->Allreduce(name, {&held, {1}, DType::kFloat64},
                                                                   {ReduceOp::kSum}, 0, [](const Status&) {}));
    };
    std::vector<Gradients> ranks(2, Gradients({}, {}, 2));
    for (int rank : {0, 1}) {
      ranks[rank] = Gradients(std::vector<bool>(members, true), {ReduceOp::kSum, 1.0, 1.0}, 2);
      ranks[rank].Fill(rank, 0);
    }
    hold(0);
    const Status status = world.engines[0]->Submit(ranks[0].exchange);
    POSEIDON_CHECK_EQ(status.code(), StatusCode::kInvalidArgument);
    POSEIDON_CHECK_CONTAINS(status.message(), name);
    POSEIDON_CHECK_EQ(ranks[0].exchange->state(), Exchange::State::kIdle);
    hold(1);
    // Rank 1's name is free once its operation has executed; submit until then.
    while (!world.engines[1]->Submit(ranks[1].exchange).ok()) std::this_thread::yield();
    POSEIDON_REQUIRE_OK(world.engines[0]->Submit(ranks[0].exchange));
    for (int rank : {0, 1}) {
      POSEIDON_CHECK_OK(world.engines[rank]->Wait({ranks[rank].exchange}));
      for (size_t i = 0; i < members; ++i) {
        POSEIDON_CHECK_EQ(ranks[rank].sources[i]->gradient, Sum(2, static_cast<int>(i), 0, 1.0));
      }
    }
    POSEIDON_CHECK_EQ(world.cluster.operations(), members + 1);
  }
}

TEST(FailureOfACollectiveRestoresNothing) {
  LocalWorld world(2);
  world.cluster.FailNext("member1", Status::Unavailable("a peer died"));
  RunRanks(2, [&](int rank) {
    Gradients gradients({true, true, true}, {ReduceOp::kSum, 1.0, 1.0}, 2);
    gradients.Fill(rank, 0);
    POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(gradients.exchange));
    POSEIDON_CHECK_EQ(world.engines[rank]->Wait({gradients.exchange}).message(), std::string("gradients: a peer died"));
    for (const auto& source : gradients.sources) POSEIDON_CHECK_EQ(source->restores, 0);
  });
}

TEST(FailureToRestore) {
  LocalWorld world(1);
  Gradients gradients({true, true}, {}, 1);
  gradients.Fill(0, 0);
  gradients.sources[0]->restore_failure = Status::Internal("decompression failed");
  POSEIDON_REQUIRE_OK(world.engines[0]->Submit(gradients.exchange));
  POSEIDON_CHECK_EQ(world.engines[0]->Wait({gradients.exchange}).message(),
                    std::string("gradients: decompression failed"));
  POSEIDON_CHECK_EQ(gradients.exchange->state(), Exchange::State::kFailed);
}

TEST(GradientsThatDifferBetweenRanksFailOnAll) {
  LocalWorld world(2);
  RunRanks(2, [&](int rank) {
    Gradients gradients({rank == 0}, {}, 2);  // float32 on rank 0, float64 on rank 1
    gradients.Fill(rank, 0);
    POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(gradients.exchange));
    const Status status = world.engines[rank]->Wait({gradients.exchange});
    POSEIDON_CHECK_EQ(status.code(), StatusCode::kInvalidArgument);
    POSEIDON_CHECK_CONTAINS(status.message(), "member0");
  });
}

// The other ways in which ranks can disagree, straight on the transport of these tests.
TEST(OperationsThatDifferBetweenRanksFailOnAll) {
  LocalCluster cluster(2);
  double values[2] = {1, 2};
  std::atomic<int> failed{0};
  const Completion count = [&](const Status& status) { failed += status.code() == StatusCode::kInvalidArgument; };
  const Buffer one{values, {1}, DType::kFloat64};
  const Buffer two{values, {2}, DType::kFloat64};
  Transport& rank0 = *cluster.transport(0);
  Transport& rank1 = *cluster.transport(1);
  for (const char* name : {"operation", "shape", "reduction", "gathered columns"}) {
    if (name == std::string("gathered columns")) {
      POSEIDON_REQUIRE_OK(rank0.Allgather(name, {values, {1, 2}, DType::kFloat64}, nullptr, 0, count));
      POSEIDON_REQUIRE_OK(rank1.Allgather(name, {values, {2, 1}, DType::kFloat64}, nullptr, 0, count));
      continue;
    }
    POSEIDON_REQUIRE_OK(rank0.Allreduce(name, one, {ReduceOp::kSum}, 0, count));
    if (name == std::string("operation")) {
      POSEIDON_REQUIRE_OK(rank1.Allgather(name, one, nullptr, 0, count));
    } else if (name == std::string("shape")) {
      POSEIDON_REQUIRE_OK(rank1.Allreduce(name, two, {ReduceOp::kSum}, 0, count));
    } else {
      POSEIDON_REQUIRE_OK(rank1.Allreduce(name, one, {ReduceOp::kAverage}, 0, count));
    }
  }
  while (cluster.operations() < 4) std::this_thread::yield();
  cluster.Shutdown();
  POSEIDON_CHECK_EQ(failed.load(), 8);
  POSEIDON_CHECK_EQ(values[0], 1.0);
  POSEIDON_CHECK_EQ(rank0.Allreduce("late", one, {}, 0, count).code(), StatusCode::kAborted);
}

}  // namespace
}  // namespace poseidon
