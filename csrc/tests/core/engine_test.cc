// Rank 0 has the engine under test. Rank 1 is played by the test, which enqueues the partner of a collective when that
// collective shall execute: so every order below is forced, not hoped for.
#include "core/engine/engine.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <stdexcept>

#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

using State = Exchange::State;

// An allreduce of one float per name; Begin and Advance can be replaced.
class ScriptedExchange final : public Exchange {
 public:
  ScriptedExchange(std::string name, std::vector<std::string> collectives, Scheme scheme = Scheme::kAllreduce)
      : Exchange(std::move(name), scheme),
        collectives_(std::move(collectives)),
        values(collectives_.size() + 1, 1.0f) {}

  // One more collective, with the last of `values`.
  Status Enqueue(Engine& engine, const std::string& name, float* value) {
    Status status = engine.transport().Allreduce(name, {value, {1}, DType::kFloat32}, {ReduceOp::kSum}, 0,
                                                 engine.CompletionOf(*this));
    if (!status.ok()) engine.CancelCompletion(*this);
    return status;
  }

 protected:
  Status Begin(Engine& engine) override {
    if (begin) return begin();
    for (size_t i = 0; i < collectives_.size(); ++i) {
      Status status = Enqueue(engine, collectives_[i], &values[i]);
      if (!status.ok()) return status;
    }
    return Status::OK();
  }
  Status Advance(Engine& engine, Progress* progress) override {
    *progress = Progress::kDone;
    return advance ? advance(engine, progress) : Status::OK();
  }
  bool cheap_advance() const override { return cheap; }

 private:
  const std::vector<std::string> collectives_;

 public:
  std::vector<float> values;
  std::function<Status()> begin;
  std::function<Status(Engine&, Progress*)> advance;
  bool cheap = false;
};

std::shared_ptr<ScriptedExchange> Make(const std::string& name, Scheme scheme = Scheme::kAllreduce) {
  return std::make_shared<ScriptedExchange>(name, std::vector<std::string>{name}, scheme);
}

struct World {
  explicit World(Engine::Options options = {}) : engine(cluster.transport(0), std::move(options)) {}
  ~World() { cluster.Shutdown(); }

  // Rank 1 enqueues `name`; returns when the operation has executed and rank 0's completion has run.
  Status Partner(const std::string& name) {
    float value = 1.0f;
    auto done = std::make_shared<std::promise<Status>>();  // shared: set_value may still be returning when get() has
    POSEIDON_REQUIRE_OK(cluster.transport(1)->Allreduce(name, {&value, {1}, DType::kFloat32}, {ReduceOp::kSum}, 0,
                                                        [done](const Status& status) { done->set_value(status); }));
    return done->get_future().get();
  }

  LocalCluster cluster{2};
  Engine engine;
};

// Collects warnings; Next() blocks until there is one that was not returned yet.
class Warnings {
 public:
  void Add(const std::string& text) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      texts_.push_back(text);
    }
    added_.notify_all();
  }
  // Drops what came before the call: a warning returned was issued after it.
  std::string Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    texts_.clear();
    added_.wait(lock, [this] { return !texts_.empty(); });
    return texts_.back();
  }

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::vector<std::string> texts_;  // guarded by mutex_
};

Engine::Options WarnEveryMillisecond(Warnings* warnings) {
  Engine::Options options;
  options.stall_warning_seconds = 1e-3;
  options.log_warning = [warnings](const std::string& text) { warnings->Add(text); };
  return options;
}

TEST(AdvancesInCompletionOrderOnTheEngineThread) {
  std::vector<std::string> advanced;  // by the engine thread; read after Wait
  std::vector<std::thread::id> threads;
  World world{Engine::Options{}};
  std::promise<void> first_entered;
  std::promise<void> all_completed;
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (const char* name : {"a", "b", "c"}) {
    auto exchange = Make(name);
    exchange->advance = [&, name](Engine&, auto*) {
      if (advanced.empty()) {  // the others queue up behind the first
        first_entered.set_value();
        all_completed.get_future().get();
      }
      char thread_name[16] = "";
      pthread_getname_np(pthread_self(), thread_name, sizeof(thread_name));
      POSEIDON_CHECK_EQ(std::string(thread_name), std::string("poseidon-engine"));
      advanced.push_back(name);
      threads.push_back(std::this_thread::get_id());
      return Status::OK();
    };
    POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
    exchanges.push_back(exchange);
  }
  POSEIDON_CHECK_OK(world.Partner("c"));
  first_entered.get_future().get();
  for (const char* name : {"a", "b"}) POSEIDON_CHECK_OK(world.Partner(name));
  all_completed.set_value();
  POSEIDON_CHECK_OK(world.engine.Wait(exchanges));
  POSEIDON_CHECK_EQ(advanced, std::vector<std::string>{"c", "a", "b"});
  POSEIDON_CHECK_EQ(threads.size(), size_t{3});
  for (const auto& thread : threads) POSEIDON_CHECK(thread == threads[0] && thread != std::this_thread::get_id());
  for (const auto& exchange : exchanges) {
    POSEIDON_CHECK_EQ(exchange->state(), State::kDone);
    const ExchangeTimes& times = exchange->times();
    POSEIDON_CHECK(Clock::time_point{} < times.enqueued && times.enqueued <= times.wire_end &&
                   times.wire_end <= times.rebuild_begin && times.rebuild_begin <= times.done);
  }
}

TEST(WaitReturnsWhileOthersAreInFlight) {
  World world;
  auto a = Make("a");
  auto b = Make("b");
  a->cheap = true;
  std::thread::id advanced_on;
  a->advance = [&](Engine&, auto*) {
    advanced_on = std::this_thread::get_id();
    return Status::OK();
  };
  POSEIDON_REQUIRE_OK(world.engine.Submit(a));
  POSEIDON_REQUIRE_OK(world.engine.Submit(b));
  POSEIDON_CHECK_EQ(world.engine.Submit(b).code(), StatusCode::kInternal);  // still in flight
  POSEIDON_CHECK_OK(world.Partner("a"));
  // A cheap exchange has ended with its completion: nothing to wait for, and no hop to the engine thread.
  POSEIDON_CHECK_EQ(a->state(), State::kDone);
  POSEIDON_CHECK(a->times().rebuild_begin == Clock::time_point{});
  POSEIDON_CHECK(advanced_on != std::thread::id{});
  POSEIDON_CHECK_OK(world.engine.Wait({a}));
  POSEIDON_CHECK_EQ(a->values[0], 2.0f);
  POSEIDON_CHECK_EQ(b->state(), State::kInFlight);
  POSEIDON_CHECK_OK(world.Partner("b"));
  POSEIDON_CHECK_OK(world.engine.Wait({a, b}));
  POSEIDON_CHECK_OK(world.engine.Wait({}));
}

TEST(SeveralWaitersAndAStallWarning) {
  Warnings warnings;
  World world(WarnEveryMillisecond(&warnings));
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (int i = 0; i < 7; ++i) {
    exchanges.push_back(Make("w" + std::to_string(i), i == 0 ? Scheme::kSfb : Scheme::kAllreduce));
    POSEIDON_REQUIRE_OK(world.engine.Submit(exchanges.back()));
  }
  std::vector<double> waited(SchemeCount());
  std::thread all([&] { POSEIDON_CHECK_OK(world.engine.Wait(exchanges, waited.data())); });
  const std::string text = warnings.Next();
  POSEIDON_CHECK_CONTAINS(text, "still waiting for w0, w1, w2, w3, w4 and 2 more");
  std::thread odd([&] {
    POSEIDON_CHECK_OK(world.engine.Wait({exchanges[1], exchanges[3], exchanges[5]}));
    POSEIDON_CHECK_EQ(exchanges[6]->state(), State::kInFlight);
  });
  std::thread even([&] { POSEIDON_CHECK_OK(world.engine.Wait({exchanges[6], exchanges[0]})); });
  for (int i : {1, 3, 5}) POSEIDON_CHECK_OK(world.Partner("w" + std::to_string(i)));
  odd.join();
  for (int i : {2, 4, 6, 0}) POSEIDON_CHECK_OK(world.Partner("w" + std::to_string(i)));
  even.join();
  all.join();
  POSEIDON_CHECK(waited[Scheme::kAllreduce.place()] > 0);
  POSEIDON_CHECK(waited[Scheme::kSfb.place()] >= 0);
  POSEIDON_CHECK_EQ(waited[Scheme::kSparseAllgather.place()], 0.0);
}

TEST(FirstFailureOfAnExchangeIsKeptUntilAllItsCollectivesEnded) {
  World world;
  auto exchange = std::make_shared<ScriptedExchange>("x", std::vector<std::string>{"x1", "x2", "x3"});
  exchange->advance = [](Engine&, auto*) {
    POSEIDON_CHECK(!"advanced after a failure");
    return Status::OK();
  };
  world.cluster.FailNext("x2", Status::Unavailable("second failed"));
  world.cluster.FailNext("x3", Status::Unavailable("third failed"));
  POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
  POSEIDON_CHECK_EQ(world.Partner("x3").code(), StatusCode::kUnavailable);  // fails first
  POSEIDON_CHECK_EQ(exchange->state(), State::kInFlight);
  POSEIDON_CHECK_EQ(world.Partner("x2").code(), StatusCode::kUnavailable);
  POSEIDON_CHECK_EQ(exchange->state(), State::kInFlight);
  POSEIDON_CHECK_OK(world.Partner("x1"));
  POSEIDON_CHECK_EQ(world.engine.Wait({exchange}).ToString(), Status::Unavailable("x: third failed").ToString());
  POSEIDON_CHECK_EQ(exchange->state(), State::kFailed);
  POSEIDON_CHECK_EQ(exchange->status().message(), std::string("x: third failed"));
}

TEST(WaitReturnsTheFailureThatCameFirstAfterAllEnded) {
  Warnings warnings;
  World world(WarnEveryMillisecond(&warnings));
  auto good = Make("good");
  auto early = Make("early");
  auto late = Make("late");
  for (const auto& exchange : {good, early, late}) POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
  world.cluster.FailNext("early", Status::Unavailable("early failed"));
  world.cluster.FailNext("late", Status::Unavailable("late failed"));
  std::thread waiter([&] {
    const Status status = world.engine.Wait({good, late, early});
    POSEIDON_CHECK_EQ(status.message(), std::string("early failed"));
    POSEIDON_CHECK_EQ(good->state(), State::kDone);
    POSEIDON_CHECK_EQ(late->state(), State::kFailed);
    POSEIDON_CHECK_EQ(early->state(), State::kFailed);
  });
  POSEIDON_CHECK(!world.Partner("early").ok());
  // Only a thread that still waits warns: the failure alone did not end the wait.
  while (warnings.Next().find("early") != std::string::npos) {
  }
  POSEIDON_CHECK(!world.Partner("late").ok());
  while (warnings.Next().find("late") != std::string::npos) {
  }
  POSEIDON_CHECK_OK(world.Partner("good"));
  waiter.join();
}

TEST(FailureInAdvance) {
  for (bool cheap : {false, true}) {
    World world;
    auto exchange = Make("x");
    exchange->cheap = cheap;
    exchange->advance = [](Engine&, auto*) { return Status::Internal("rebuild failed"); };
    POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
    POSEIDON_CHECK_OK(world.Partner("x"));
    POSEIDON_CHECK_EQ(world.engine.Wait({exchange}).message(), std::string("x: rebuild failed"));
    POSEIDON_CHECK_EQ(exchange->state(), State::kFailed);
    exchange->advance = nullptr;
    POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
    POSEIDON_CHECK_OK(world.Partner("x"));
    POSEIDON_CHECK_OK(world.engine.Wait({exchange}));
    POSEIDON_CHECK_OK(exchange->status());
  }
}

TEST(FollowUpCollectives) {
  World world;
  auto exchange = Make("x");
  int advances = 0;
  exchange->advance = [&, raw = exchange.get()](Engine& engine, auto* progress) {
    if (++advances > 3) return Status::OK();
    *progress = std::decay_t<decltype(*progress)>::kPending;
    return raw->Enqueue(engine, "x.more", &raw->values[1]);
  };
  POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
  POSEIDON_CHECK_OK(world.Partner("x"));
  for (int i = 0; i < 3; ++i) POSEIDON_CHECK_OK(world.Partner("x.more"));
  POSEIDON_CHECK_OK(world.engine.Wait({exchange}));
  POSEIDON_CHECK_EQ(advances, 4);
  POSEIDON_CHECK_EQ(exchange->values[1], 4.0f);
}

TEST(FailureInAdvanceWaitsForWhatItHadEnqueued) {
  World world;
  auto exchange = Make("x");
  std::promise<void> failing;
  exchange->advance = [&, raw = exchange.get()](Engine& engine, auto* progress) {
    *progress = std::decay_t<decltype(*progress)>::kPending;
    POSEIDON_REQUIRE_OK(raw->Enqueue(engine, "x.more", &raw->values[1]));
    failing.set_value();
    return raw->Enqueue(engine, "x.more", &raw->values[1]);  // a duplicate name
  };
  // FIFO: when a later exchange has been advanced, this one's Advance has returned.
  auto later = Make("later");
  POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
  POSEIDON_REQUIRE_OK(world.engine.Submit(later));
  POSEIDON_CHECK_OK(world.Partner("x"));
  POSEIDON_CHECK_OK(world.Partner("later"));
  POSEIDON_CHECK_OK(world.engine.Wait({later}));
  failing.get_future().get();
  POSEIDON_CHECK_EQ(exchange->state(), State::kInFlight);  // the transport still uses its buffer
  POSEIDON_CHECK_OK(world.Partner("x.more"));
  const Status status = world.engine.Wait({exchange});
  POSEIDON_CHECK_EQ(status.code(), StatusCode::kInvalidArgument);
  POSEIDON_CHECK_CONTAINS(status.message(), "x.more is already in flight");
  exchange->advance = nullptr;
  POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
  POSEIDON_CHECK_EQ(exchange->state(), State::kInFlight);
  POSEIDON_CHECK_OK(world.Partner("x"));
  POSEIDON_CHECK_OK(world.engine.Wait({exchange}));
}

TEST(StopWhileInFlight) {
  Warnings warnings;
  World world(WarnEveryMillisecond(&warnings));
  auto cheap = Make("cheap");
  cheap->cheap = true;
  auto heavy = Make("heavy");
  heavy->advance = [](Engine&, auto*) {
    POSEIDON_CHECK(!"advanced after Stop");
    return Status::OK();
  };
  POSEIDON_REQUIRE_OK(world.engine.Submit(cheap));
  POSEIDON_REQUIRE_OK(world.engine.Submit(heavy));
  std::thread waiter([&] {
    const Status status = world.engine.Wait({cheap, heavy});
    POSEIDON_CHECK_EQ(status.code(), StatusCode::kAborted);
    POSEIDON_CHECK_CONTAINS(status.message(), "cheap, heavy");
  });
  warnings.Next();  // it waits
  world.engine.Stop();
  waiter.join();
  world.engine.Stop();
  POSEIDON_CHECK_EQ(world.engine.Wait({heavy}).code(), StatusCode::kAborted);  // does not block

  auto unsent = Make("unsent");
  const Status refused = world.engine.Submit(unsent);
  POSEIDON_CHECK_EQ(refused.code(), StatusCode::kAborted);
  POSEIDON_CHECK_CONTAINS(refused.message(), "unsent");
  POSEIDON_CHECK_EQ(unsent->state(), State::kIdle);

  // What the transport still owed arrives late.
  POSEIDON_CHECK_OK(world.Partner("cheap"));
  POSEIDON_CHECK_OK(world.Partner("heavy"));
  POSEIDON_CHECK_EQ(cheap->state(), State::kDone);
  POSEIDON_CHECK_OK(world.engine.Wait({cheap}));
  POSEIDON_CHECK_EQ(world.engine.Wait({cheap, heavy}).code(), StatusCode::kAborted);
  world.engine.Stop();
  POSEIDON_CHECK_EQ(world.cluster.executed(), std::vector<std::string>{"cheap", "heavy"});
}

TEST(StopWaitsForTheExchangeBeingAdvanced) {
  World world;
  auto exchange = Make("x");
  std::promise<void> entered;
  std::promise<void> leave;
  std::atomic<bool> left{false};
  exchange->advance = [&](Engine&, auto*) {
    entered.set_value();
    leave.get_future().get();
    left = true;
    return Status::OK();
  };
  POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
  POSEIDON_CHECK_OK(world.Partner("x"));
  entered.get_future().get();
  std::thread stopper([&] {
    world.engine.Stop();
    POSEIDON_CHECK(left);
  });
  POSEIDON_CHECK_EQ(world.engine.Wait({exchange}).code(), StatusCode::kAborted);  // returns only because of Stop
  leave.set_value();
  stopper.join();
  POSEIDON_CHECK_EQ(exchange->state(), State::kDone);
}

TEST(TransportShutdownFailsWhatIsPending) {
  World world;
  auto exchange = std::make_shared<ScriptedExchange>("x", std::vector<std::string>{"x1", "x2"});
  POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
  POSEIDON_CHECK_OK(world.Partner("x1"));
  world.cluster.Shutdown();
  POSEIDON_CHECK_EQ(world.engine.Wait({exchange}).code(), StatusCode::kAborted);
  POSEIDON_CHECK_EQ(world.engine.Submit(exchange).code(), StatusCode::kAborted);
}

TEST(SameExchangeForManySteps) {
  constexpr int kRanks = 2;
  constexpr int kSteps = 1000;
  LocalWorld world(kRanks);
  RunRanks(kRanks, [&](int rank) {
    Engine& engine = *world.engines[rank];
    auto heavy = std::make_shared<ScriptedExchange>("heavy", std::vector<std::string>{"h1", "h2"});
    auto cheap = Make("cheap");
    cheap->cheap = true;
    int advances = 0;  // written by the engine thread, read after Wait
    heavy->advance = [&](Engine&, auto*) {
      ++advances;
      return Status::OK();
    };
    for (int step = 0; step < kSteps; ++step) {
      heavy->values = {float(step + rank), float(step - rank), 0};
      cheap->values = {float(2 * step + rank), 0};
      POSEIDON_REQUIRE_OK(engine.Submit(rank == 0 ? heavy : cheap));
      POSEIDON_REQUIRE_OK(engine.Submit(rank == 0 ? cheap : heavy));
      POSEIDON_REQUIRE_OK(engine.Wait({heavy, cheap}));
      POSEIDON_CHECK_EQ(advances, step + 1);
      POSEIDON_CHECK_EQ(heavy->values, std::vector<float>{float(2 * step + 1), float(2 * step - 1), 0});
      POSEIDON_CHECK_EQ(cheap->values[0], float(4 * step + 1));
    }
  });
  POSEIDON_CHECK_EQ(world.cluster.operations(), size_t{3 * kSteps});
}

TEST(BeginThatFailsOrThrowsLeavesNothingInFlight) {
  World world;
  auto exchange = Make("x");
  exchange->begin = [] { return Status::InvalidArgument("no message"); };
  POSEIDON_CHECK_EQ(world.engine.Submit(exchange).message(), std::string("x: no message"));
  POSEIDON_CHECK_EQ(exchange->state(), State::kIdle);
  exchange->begin = []() -> Status { throw std::runtime_error("compressor"); };
  try {
    (void)world.engine.Submit(exchange);
    POSEIDON_CHECK(!"swallowed");
  } catch (const std::runtime_error& error) {
    POSEIDON_CHECK_EQ(std::string(error.what()), std::string("compressor"));
  }
  POSEIDON_CHECK_EQ(exchange->state(), State::kIdle);
  POSEIDON_CHECK_OK(world.engine.Wait({exchange}));  // nothing to wait for
  exchange->begin = nullptr;

  auto holder = Make("x");  // the transport refuses a name in flight
  POSEIDON_REQUIRE_OK(world.engine.Submit(holder));
  POSEIDON_CHECK_EQ(world.engine.Submit(exchange).code(), StatusCode::kInvalidArgument);
  POSEIDON_CHECK_EQ(exchange->state(), State::kIdle);
  POSEIDON_CHECK_OK(world.Partner("x"));
  POSEIDON_CHECK_OK(world.engine.Wait({holder}));
  POSEIDON_CHECK_EQ(exchange->values[0], 1.0f);

  POSEIDON_REQUIRE_OK(world.engine.Submit(exchange));
  POSEIDON_CHECK_EQ(exchange->state(), State::kInFlight);
  POSEIDON_CHECK_OK(world.Partner("x"));
  POSEIDON_CHECK_OK(world.engine.Wait({exchange}));
  POSEIDON_CHECK_EQ(exchange->values[0], 2.0f);
}

// A process forks (a data loader's worker) while other threads use the engine, so its lock may be held for ever in the
// child.
TEST(StopInAForkedChild) {
  constexpr int kForks = 20;
  World world;
  auto pending = Make("pending");
  POSEIDON_REQUIRE_OK(world.engine.Submit(pending));
  LocalWorld busy(1);
  Engine& engine = *busy.engines[0];
  std::atomic<bool> finished{false};
  std::vector<std::thread> users;
  for (const char* name : {"one", "two"}) {
    users.emplace_back([&, name] {
      auto exchange = Make(name);
      while (!finished) {
        POSEIDON_REQUIRE_OK(engine.Submit(exchange));
        POSEIDON_REQUIRE_OK(engine.Wait({exchange}));
      }
    });
  }
  for (int i = 0; i < kForks; ++i) {
    const pid_t child = fork();
    POSEIDON_REQUIRE(child >= 0);
    if (child == 0) {
      alarm(10);  // a hang kills the child, which the parent reports
      for (int twice = 0; twice < 2; ++twice) {
        world.engine.Stop();
        engine.Stop();
      }
      _exit(0);
    }
    int status = 0;
    POSEIDON_REQUIRE(waitpid(child, &status, 0) == child);
    POSEIDON_CHECK(WIFEXITED(status));
    POSEIDON_REQUIRE(!WIFEXITED(status) || WEXITSTATUS(status) == 0);
  }
  finished = true;
  for (std::thread& user : users) user.join();
  POSEIDON_CHECK_OK(world.Partner("pending"));  // the parent's engines are untouched
  POSEIDON_CHECK_OK(world.engine.Wait({pending}));
}

// A deadline so far away that the clock cannot count to it lies in the past if it overflows: then a wait spins, and
// warns all the time.
TEST(AWaitOfAnyLengthWarnsWhenItIsOverOnly) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (double seconds : {kInfinity, 1e300, 1e18, 1e10, -kInfinity, -1.0, 0.0, std::nan("")}) {
    std::atomic<int> warnings{0};
    Engine::Options options;
    options.stall_warning_seconds = seconds;
    options.log_warning = [&](const std::string&) { ++warnings; };
    World world{std::move(options)};
    auto pending = Make("pending");
    POSEIDON_REQUIRE_OK(world.engine.Submit(pending));
    std::promise<void> entered;
    std::thread waiter([&] {
      entered.set_value();
      POSEIDON_CHECK_OK(world.engine.Wait({pending}));
    });
    entered.get_future().get();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // in which a past deadline gives thousands of warnings
    POSEIDON_CHECK_OK(world.Partner("pending"));
    waiter.join();
    POSEIDON_CHECK_EQ(warnings.load(), 0);
  }
}

TEST(ABoundedWaitOfAnyLengthEndsWithTheExchange) {
  for (double seconds : {std::numeric_limits<double>::infinity(), 1e300, 1e10}) {
    World world;
    auto pending = Make("pending");
    POSEIDON_REQUIRE_OK(world.engine.Submit(pending));
    auto ended = std::async(std::launch::async, [&] { return world.engine.WaitFor({pending}, seconds); });
    POSEIDON_CHECK(ended.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
    POSEIDON_CHECK_OK(world.Partner("pending"));
    POSEIDON_CHECK(ended.get());
  }
  World world;
  auto pending = Make("pending");
  POSEIDON_REQUIRE_OK(world.engine.Submit(pending));
  for (double seconds : {-1.0, 0.0, std::nan("")}) POSEIDON_CHECK(!world.engine.WaitFor({pending}, seconds));
  POSEIDON_CHECK_OK(world.Partner("pending"));
  POSEIDON_CHECK_OK(world.engine.Wait({pending}));
}

}  // namespace
}  // namespace poseidon
