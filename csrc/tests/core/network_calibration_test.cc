#include "core/model/network_calibration.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

TEST(AllRanksFitTheSame) {
  constexpr int kSize = 3;
  LocalWorld world(kSize, std::chrono::microseconds(200));
  std::vector<NetworkModel> models(kSize);
  RunRanks(kSize, [&](int rank) {
    CalibrationOptions options;
    options.name_prefix = "calibrate";
    options.size = kSize;
    options.budget_seconds = 0.05;
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));  // late once: not slow
    POSEIDON_CHECK_OK(MeasureNetwork(*world.engines[rank], options, &models[rank]));
  });
  for (const NetworkModel& model : models) {
    POSEIDON_CHECK(model.known());
    POSEIDON_CHECK_EQ(model.allreduce.alpha, models[0].allreduce.alpha);
    POSEIDON_CHECK_EQ(model.allreduce.beta, models[0].allreduce.beta);
    POSEIDON_CHECK_EQ(model.allgather.alpha, models[0].allgather.alpha);
    POSEIDON_CHECK_EQ(model.allgather.beta, models[0].allgather.beta);
    POSEIDON_CHECK_EQ(model.skew_seconds, models[0].skew_seconds);
    POSEIDON_CHECK(model.allreduce.alpha < 0.05);
  }
  const std::vector<std::string> executed = world.cluster.executed();
  for (const char* name : {"calibrate.allreduce.4096", "calibrate.allgather.4096"}) {
    POSEIDON_CHECK(std::count(executed.begin(), executed.end(), name) >= 3);
  }
}

TEST(FailureOfACollectiveIsReported) {
  LocalWorld world(2);
  world.cluster.FailNext("calibrate.allgather.4096", Status::Unavailable("the link is down"));
  RunRanks(2, [&](int rank) {
    CalibrationOptions options;
    options.name_prefix = "calibrate";
    options.size = 2;
    options.budget_seconds = 0;  // one size of each
    NetworkModel model;
    const Status status = MeasureNetwork(*world.engines[rank], options, &model);
    POSEIDON_CHECK_EQ(status.code(), StatusCode::kUnavailable);
    POSEIDON_CHECK_CONTAINS(status.message(), "the link is down");
    POSEIDON_CHECK(!model.known());
  });
}

}  // namespace
}  // namespace poseidon
