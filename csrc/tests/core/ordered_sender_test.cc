#include "core/engine/ordered_sender.h"

#include <chrono>
#include <thread>

#include "core/schemes/dense_exchange.h"
#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

class OneFloat final : public DenseSource {
 public:
  Status PrepareWire(Buffer* wire) override {
    *wire = Buffer{&value, {1}, DType::kFloat32};
    return Status::OK();
  }
  bool needs_restore() const override { return false; }
  Status RestoreFromWire() override { return Status::OK(); }

  float value = 1;
};

// A rank with exchanges "0", "1", ... of one byte each, as far as the credit goes.
struct Rank {
  Rank(LocalWorld& world, int rank, int size, int count, double credit) : engine(*world.engines[rank]) {
    std::vector<OrderedSender::Item> order;
    for (int i = 0; i < count; ++i) {
      const std::string name = std::to_string(i);
      exchanges.push_back(std::make_shared<DenseExchange>(
          name, std::vector<DenseExchange::Member>{{name, std::make_shared<OneFloat>()}}, Reduction{ReduceOp::kSum}, 0,
          size));
      order.push_back({exchanges.back(), 1});
    }
    sender = std::make_shared<OrderedSender>(&engine, credit, std::move(order));
    sender->Attach();
  }

  Status Ready(int position) {
    Status status = engine.Admit(exchanges[position]);
    if (status.ok()) sender->Ready(static_cast<size_t>(position));
    return status;
  }
  Status Wait() { return engine.Wait({exchanges.begin(), exchanges.end()}); }

  Engine& engine;
  std::vector<std::shared_ptr<Exchange>> exchanges;
  std::shared_ptr<OrderedSender> sender;
};

TEST(SendsInOrderWhateverTheOrderOfReadiness) {
  constexpr int kSize = 3, kCount = 20;
  for (double credit : {1.0, 2.0, 100.0}) {
    LocalWorld world(kSize, std::chrono::microseconds(50));
    RunRanks(kSize, [&](int rank) {
      Rank self(world, rank, kSize, kCount, credit);
      for (int step = 0; step < 3; ++step) {
        for (int i = 0; i < kCount; ++i)
          POSEIDON_CHECK_OK(self.Ready((i * (rank == 0 ? 7 : rank == 1 ? 1 : 13) + 3) % kCount));
        POSEIDON_CHECK_OK(self.Wait());
        self.sender->Reset();
      }
    });
    if (credit > 1) continue;  // one at a time: executed exactly in order
    const std::vector<std::string> executed = world.cluster.executed();
    POSEIDON_REQUIRE(executed.size() == 3 * kCount);
    for (size_t i = 0; i < executed.size(); ++i) POSEIDON_CHECK_EQ(executed[i], std::to_string(i % kCount));
  }
}

TEST(NothingOvertakesWhatIsNotReady) {
  LocalWorld world(1);
  Rank self(world, 0, 1, 3, 100);
  POSEIDON_CHECK_OK(self.Ready(1));
  POSEIDON_CHECK_OK(self.Ready(2));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  POSEIDON_CHECK(world.cluster.executed().empty());
  POSEIDON_CHECK(self.exchanges[1]->state() == Exchange::State::kInFlight);
  POSEIDON_CHECK_OK(self.Ready(0));
  POSEIDON_CHECK_OK(self.Wait());
  POSEIDON_CHECK_EQ(world.cluster.executed().size(), size_t{3});
}

TEST(AFailureEndsWhatWaitsBehindIt) {
  LocalWorld world(1);
  world.cluster.FailNext("1", Status::Unavailable("the link is down"));
  Rank self(world, 0, 1, 4, 1);
  for (int i = 0; i < 4; ++i) POSEIDON_CHECK_OK(self.Ready(i));
  const Status status = self.Wait();
  POSEIDON_CHECK_EQ(status.code(), StatusCode::kUnavailable);
  POSEIDON_CHECK_CONTAINS(status.message(), "the link is down");
  POSEIDON_CHECK(self.exchanges[3]->state() == Exchange::State::kFailed);
  self.sender->Reset();
  for (int i = 0; i < 4; ++i) POSEIDON_CHECK_OK(self.Ready(i));
  POSEIDON_CHECK_OK(self.Wait());
}

}  // namespace
}  // namespace poseidon
