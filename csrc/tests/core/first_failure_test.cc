// What is told after a failure: the one that came first, whatever follows from it, and wherever that shows.
#include "core/engine/first_failure.h"

#include <new>
#include <stdexcept>

#include "core/engine/gather_bytes.h"
#include "core/engine/scalar_sum.h"
#include "core/model/network_calibration.h"
#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

using State = Exchange::State;

const std::string kShutDown = "after: the transport has been shut down";
const std::string kNoMemory = "sfb.2.weight: out of memory: 2 gathered rows take 8 bytes (std::bad_alloc). Buy some.";

// A gather of one float per rank whose memory, or whose rebuild, may be missing.
class Gather final : public Exchange {
 public:
  explicit Gather(std::string name) : Exchange(std::move(name), Scheme::kSfb) {}

  bool no_memory = false;
  std::function<Status()> advance;

 protected:
  Status Begin(Engine& engine) override {
    const Buffer in{&value_, {1}, DType::kFloat32};
    auto allocate = [this](const std::vector<int64_t>& shape) {
      if (no_memory) throw std::bad_alloc();
      gathered_.resize(shape[0]);
      return Buffer{gathered_.data(), shape, DType::kFloat32};
    };
    Allocator reported = engine.AllocatorOf(*this, in.dtype, "Buy some.", allocate);
    Status status = engine.transport().Allgather(name(), in, std::move(reported), 0, engine.CompletionOf(*this));
    if (!status.ok()) engine.CancelCompletion(*this);
    return status;
  }
  Status Advance(Engine&, Progress* progress) override {
    *progress = Progress::kDone;
    return advance ? advance() : Status::OK();
  }

 private:
  float value_ = 1;
  std::vector<float> gathered_;
};

Status Sum(Engine& engine, const std::string& name, int size) {
  double value = 1;
  return SumOverRanks(engine, name, 0, size, &value);
}

void CheckFollows(const Status& status, const std::string& name, const std::string& first,
                  StatusCode code = StatusCode::kAborted) {
  POSEIDON_CHECK_EQ(status.code(), code);
  POSEIDON_CHECK_EQ(status.message(), first + " Because of that " + name + " was not exchanged.");
}

TEST(WhateverComesAfterAShutdownNamesTheFailureBeforeIt) {
  LocalWorld world(2);
  world.cluster.FailNext("sfb.0.weight", Status::Unavailable("connection closed by peer."));
  RunRanks(2, [&](int rank) {
    auto exchange = std::make_shared<Gather>("sfb.0.weight");
    POSEIDON_REQUIRE_OK(world.engines[rank]->Submit(exchange));
    POSEIDON_CHECK_EQ(world.engines[rank]->Wait({exchange}).code(), StatusCode::kUnavailable);
  });
  world.cluster.Shutdown();
  const std::string first = "sfb.0.weight: connection closed by peer.";
  Engine& engine = *world.engines[0];
  std::vector<std::vector<uint8_t>> by_rank;
  NetworkModel network;
  CalibrationOptions calibration;
  calibration.name_prefix = "calibrate";
  calibration.size = 2;
  CheckFollows(GatherBytes(engine, "agree.plan", 0, 2, {}, &by_rank), "agree.plan", first);
  CheckFollows(Sum(engine, "live", 2), "live", first);
  CheckFollows(MeasureNetwork(engine, calibration, &network), "calibrate.allreduce.4096", first);
}

TEST(WaitPrefersTheCauseToWhatFollows) {
  LocalWorld world(2);
  auto lost = std::make_shared<ScalarSum>("lost", 0, 2);
  auto failed = std::make_shared<Gather>("failed");
  auto partner = std::make_shared<Gather>("failed");
  Engine& engine = *world.engines[0];
  POSEIDON_REQUIRE_OK(engine.Submit(lost));  // rank 1 never sends it
  POSEIDON_REQUIRE_OK(engine.Submit(failed));
  world.cluster.FailNext("failed", Status::Unavailable("gone."));
  POSEIDON_REQUIRE_OK(world.engines[1]->Submit(partner));
  POSEIDON_CHECK(!engine.Wait({failed}).ok());
  world.cluster.Shutdown();
  POSEIDON_CHECK_EQ(engine.Wait({lost, failed}).message(), std::string("failed: gone."));
  CheckFollows(engine.Wait({lost}), "lost", "failed: gone.");
}

// A failure that the transport survives, such as shapes that differ, is not to blame for what happens later.
TEST(ALaterSuccessAcquits) {
  LocalWorld world(2);
  for (const std::string name : {"early", "mismatch", "late"}) {
    const bool fails = name == "mismatch";
    if (fails) world.cluster.FailNext(name, Status::Unavailable("shapes differ."));
    RunRanks(2, [&](int rank) { POSEIDON_CHECK_EQ(Sum(*world.engines[rank], name, 2).ok(), !fails); });
  }
  world.cluster.Shutdown();
  POSEIDON_CHECK_EQ(Sum(*world.engines[0], "after", 2).message(), kShutDown);
}

TEST(ASuccessOfWhatHadBegunBeforeDoesNotAcquit) {
  LocalWorld world(2);
  Engine& engine = *world.engines[0];
  auto before = std::make_shared<ScalarSum>("before", 0, 2);
  POSEIDON_REQUIRE_OK(engine.Submit(before));
  world.cluster.FailNext("bad", Status::Unavailable("mishap."));
  RunRanks(2, [&](int rank) { POSEIDON_CHECK(!Sum(*world.engines[rank], "bad", 2).ok()); });
  POSEIDON_CHECK_OK(Sum(*world.engines[1], "before", 2));
  POSEIDON_CHECK_OK(engine.Wait({before}));
  world.cluster.Shutdown();
  CheckFollows(Sum(engine, "after", 2), "after", "bad: mishap.");
}

TEST(ARestartOfTheTransportForgets) {
  LocalWorld world(1);
  world.cluster.FailNext("bad", Status::Unavailable("bad luck."));
  POSEIDON_CHECK(!Sum(*world.engines[0], "bad", 1).ok());
  world.engines[0]->ForgetFailures();
  world.cluster.Shutdown();
  POSEIDON_CHECK_EQ(Sum(*world.engines[0], "after", 1).message(), kShutDown);
}

TEST(NoMemoryForAGatherIsToldAtOnceAndByName) {
  LocalCluster cluster(2);
  std::vector<std::string> told;  // by the transport's thread, before it completes the gather
  Engine::Options options;
  options.log_warning = [&](const std::string& text) { told.push_back(text); };
  Engine poor(cluster.transport(0), options);
  Engine rich(cluster.transport(1), {});
  auto gather = std::make_shared<Gather>("sfb.2.weight");
  auto partner = std::make_shared<Gather>("sfb.2.weight");
  auto waiting = std::make_shared<ScalarSum>("waiting", 0, 2);
  gather->no_memory = true;
  POSEIDON_REQUIRE_OK(poor.Submit(waiting));
  POSEIDON_REQUIRE_OK(poor.Submit(gather));
  POSEIDON_REQUIRE_OK(rich.Submit(partner));
  const Status status = poor.Wait({waiting, gather});
  POSEIDON_CHECK_EQ(status.code(), StatusCode::kOutOfMemory);
  POSEIDON_CHECK_EQ(status.message(), kNoMemory);
  POSEIDON_CHECK_EQ(told, std::vector<std::string>{status.message()});
  POSEIDON_CHECK_EQ(rich.Wait({partner}).message(), std::string("sfb.2.weight: a peer has gone"));
  cluster.Shutdown();
  CheckFollows(waiting->status(), "waiting", status.message(), status.code());
  std::vector<std::vector<uint8_t>> by_rank;
  CheckFollows(GatherBytes(poor, "agree.plan", 0, 2, {}, &by_rank), "agree.plan", status.message(), status.code());
}

// Its gathers fail for want of memory, and what else is in flight then never ends.
class StuckTransport final : public Transport {
 public:
  Status Allreduce(const std::string&, const Buffer&, const Reduction&, int, Completion done) override {
    stuck.push_back(std::move(done));
    return Status::OK();
  }
  Status GroupedAllreduce(const std::vector<std::string>&, const std::vector<Buffer>&, const Reduction&, int,
                          std::vector<Completion>) override {
    return Status::Internal("not used");
  }
  Status Allgather(const std::string&, const Buffer&, Allocator allocate, int, Completion done) override {
    try {
      allocate({1});
      return Status::Internal("there was memory");
    } catch (const std::exception&) {
      done(Status::Unavailable("the allocator has thrown"));
    }
    return Status::OK();
  }
  std::vector<Completion> stuck;
};

TEST(NoWaitForWhatMayNeverEndAfterThat) {
  StuckTransport transport;
  Engine engine(&transport, {});
  auto stuck = std::make_shared<ScalarSum>("stuck", 0, 2);
  auto gather = std::make_shared<Gather>("gather");
  gather->no_memory = true;
  POSEIDON_REQUIRE_OK(engine.Submit(stuck));
  POSEIDON_REQUIRE_OK(engine.Submit(gather));
  POSEIDON_CHECK_EQ(engine.Wait({stuck, gather}).code(), StatusCode::kOutOfMemory);
  POSEIDON_CHECK_EQ(engine.Wait({stuck}).code(), StatusCode::kOutOfMemory);
  POSEIDON_CHECK_EQ(stuck->state(), State::kInFlight);  // it keeps its buffers
  for (const Completion& done : transport.stuck) done(Status::Aborted("shut down"));
  CheckFollows(engine.Wait({stuck}), "stuck", gather->status().message(), StatusCode::kOutOfMemory);
}

TEST(AnExceptionOnTheEngineThreadIsAFailure) {
  LocalWorld world(1);
  auto gather = std::make_shared<Gather>("gather");
  gather->advance = []() -> Status { throw std::runtime_error("no room to rebuild"); };
  POSEIDON_REQUIRE_OK(world.engines[0]->Submit(gather));
  const Status status = world.engines[0]->Wait({gather});
  POSEIDON_CHECK_EQ(status.ToString(), Status::Internal("gather: no room to rebuild").ToString());
}

}  // namespace
}  // namespace poseidon
