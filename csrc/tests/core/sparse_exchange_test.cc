#include "core/schemes/sparse_exchange.h"

#include "core/engine/engine.h"
#include "core/model/cost_model.h"
#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

struct Received final : SparseExchange::Receiver {
  Buffer AllocateIndices(const std::vector<int64_t>& shape) override {
    indices.resize(shape[0] * shape[1]);
    return {indices.data(), shape, DType::kInt64};
  }
  Buffer AllocateValues(const std::vector<int64_t>& shape) override {
    values.resize(shape[0] * shape[1]);
    return {values.data(), shape, DType::kFloat32};
  }

  std::vector<int64_t> indices;
  std::vector<float> values;
};

// Rank r has r entries of two values each: the first rank none.
struct Entries {
  explicit Entries(int rank) : indices(rank), values(2 * rank) {
    for (int i = 0; i < rank; ++i) {
      indices[i] = 10 * rank + i;
      values[2 * i] = static_cast<float>(rank);
      values[2 * i + 1] = static_cast<float>(-i);
    }
  }
  void Send(SparseExchange* exchange) {
    const auto count = static_cast<int64_t>(indices.size());
    exchange->SetMessage({indices.data(), {count, 1}, DType::kInt64}, {values.data(), {count, 2}, DType::kFloat32});
  }

  std::vector<int64_t> indices;
  std::vector<float> values;
};

TEST(EntriesOfAllRanksInTheirOrder) {
  constexpr int kSize = 3;
  LocalWorld world(kSize);
  RunRanks(kSize, [&](int rank) {
    const auto received = std::make_shared<Received>();
    const auto exchange = std::make_shared<SparseExchange>("sparse", "table.weight", received, 0, kSize);
    for (int step = 0; step < 2; ++step) {
      Entries mine(rank);
      mine.Send(exchange.get());
      POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(exchange));
      POSEIDON_REQUIRE_OK(world.engines[rank]->Wait({exchange}));
      std::vector<int64_t> indices;
      std::vector<float> values;
      for (int r = 0; r < kSize; ++r) {
        const Entries theirs(r);
        indices.insert(indices.end(), theirs.indices.begin(), theirs.indices.end());
        values.insert(values.end(), theirs.values.begin(), theirs.values.end());
      }
      POSEIDON_CHECK_EQ(received->indices, indices);
      POSEIDON_CHECK_EQ(received->values, values);
      POSEIDON_CHECK_EQ(exchange->wire().collectives, 2);
      POSEIDON_CHECK_EQ(exchange->wire().bytes_sent, AllgatherWireBytes(3 * 8 + 3 * 2 * 4, kSize));
    }
  });
}

TEST(FailureOfOneGatherEndsTheExchange) {
  for (const char* what : {"table.indices", "table.values"}) {
    LocalWorld world(2);
    world.cluster.FailNext(what, Status::Unavailable("gone"));
    RunRanks(2, [&](int rank) {
      const auto exchange =
          std::make_shared<SparseExchange>("table", "table.weight", std::make_shared<Received>(), 0, 2);
      Entries mine(rank + 1);
      mine.Send(exchange.get());
      POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(exchange));
      const Status status = world.engines[rank]->Wait({exchange});
      POSEIDON_CHECK(status.code() == StatusCode::kUnavailable);
      POSEIDON_CHECK_CONTAINS(status.message(), "gone");
    });
  }
}

}  // namespace
}  // namespace poseidon
