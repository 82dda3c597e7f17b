#include "core/engine/scalar_sum.h"

#include <limits>

#include "core/model/cost_model.h"
#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

TEST(TheSameSumOnAllRanks) {
  LocalWorld world(3);
  RunRanks(3, [&](int rank) {
    for (double part : {1.0, 0.25, 1e15}) {  // 3e15 + 3 needs more digits than float32 has
      double value = part + rank;
      POSEIDON_CHECK_OK(SumOverRanks(*world.engines[rank], "sum", 0, 3, &value));
      POSEIDON_CHECK_EQ(value, 3 * part + 3);
    }
  });
}

TEST(OneExchangeForManySteps) {
  LocalWorld world(2);
  RunRanks(2, [&](int rank) {
    auto exchange = std::make_shared<ScalarSum>("live", 0, 2);
    for (int step = 0; step < 3; ++step) {
      exchange->SetValue(1);
      POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(exchange));
      POSEIDON_REQUIRE_OK(world.engines[rank]->Wait({exchange}));
      POSEIDON_CHECK_EQ(exchange->sum(), 2.0);
      POSEIDON_CHECK_EQ(exchange->wire().collectives, 1);
      POSEIDON_CHECK_EQ(exchange->wire().bytes_sent, AllreduceWireBytes(1, DType::kFloat64, 2));
      POSEIDON_CHECK_EQ(exchange->wire().dense_bytes, 0.0);
    }
  });
}

TEST(AFailureLeavesTheValue) {
  LocalWorld world(3);
  world.cluster.FailNext("sum", Status::Unavailable("gone"));
  RunRanks(3, [&](int rank) {
    double value = 7;
    POSEIDON_CHECK_EQ(SumOverRanks(*world.engines[rank], "sum", 0, 3, &value).code(), StatusCode::kUnavailable);
    POSEIDON_CHECK_EQ(value, 7.0);
    POSEIDON_CHECK_EQ(SumOverRanks(*world.engines[rank], "sum", 1, 3, &value).code(), StatusCode::kInvalidArgument);
  });
}

TEST(ASumThatIsNoNumberIsAnErrorOnAllRanks) {
  LocalWorld world(2);
  RunRanks(2, [&](int rank) {
    for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      double value = rank == 1 ? bad : 1;
      const Status status = SumOverRanks(*world.engines[rank], "samples", 0, 2, &value);
      POSEIDON_CHECK_EQ(status.code(), StatusCode::kInvalidArgument);
      POSEIDON_CHECK_CONTAINS(status.message(), "samples: the sum over ranks is");
    }
  });
}

}  // namespace
}  // namespace poseidon
