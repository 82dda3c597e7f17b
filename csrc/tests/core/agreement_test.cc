#include "core/plan/agreement.h"

#include <memory>
#include <utility>

#include "core/plan/schedule.h"
#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

constexpr int kSize = 3;

// A linear layer with its bias, and one more gradient.
RankProfile Profile(int rank) {
  RankProfile profile;
  profile.settings_text = "policy=time";
  profile.compute_seconds = 0.5;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    TensorProfile tensor;
    tensor.name = name;
    tensor.shape = std::move(shape);
    tensor.used = tensor.complete = true;
    tensor.ready_seconds = 0.1 * static_cast<double>(1 + profile.tensors.size());
    tensor.order = static_cast<int64_t>(profile.tensors.size());
    tensor.reason = "not a linear weight";
    profile.tensors.push_back(std::move(tensor));
  };
  add("fc.weight", {1024, 1024});
  add("fc.bias", {1024});
  add("scale", {10});
  TensorProfile& weight = profile.tensors[0];
  weight.is_linear_weight = weight.sfb_allowed = true;
  weight.reason.clear();
  weight.bias = "fc.bias";
  weight.rows = 10 + rank;
  weight.calls = 1;
  return profile;
}

struct Rank {
  RankProfile profile;
  double seconds = 0;  // that this rank measures for a product
  std::vector<LocalTensor> tensors;
  Plan plan;
  Status status;
  MergedProfile merged;
  std::vector<LayerCost> costs;
  int measured = 0, asked = 0;
};

struct World {
  LocalWorld world{kSize};
  std::vector<Rank> ranks{kSize};
  Policy policy = Policy::kTime;
  NetworkModel network{{1e-3, 1e-7}, {1e-3, 1e-7}, 0, false};
  std::vector<std::unique_ptr<Agreement>> agreements{kSize};

  World() {
    for (int rank = 0; rank < kSize; ++rank) {
      ranks[rank].profile = Profile(rank);
      ranks[rank].seconds = 1e-3 * (rank + 1);
      for (const TensorProfile& tensor : ranks[rank].profile.tensors) {
        ranks[rank].tensors.push_back({tensor.name, tensor.shape});
      }
    }
  }

  void Agree(int64_t steps = 0, bool forget = false) {
    RunRanks(kSize, [&](int rank) {
      Rank& self = ranks[rank];
      if (!agreements[rank]) agreements[rank] = Make(rank);
      const Plan in_force = self.plan;
      self.status = agreements[rank]->Agree(in_force, steps, forget, &self.plan);
      self.merged = agreements[rank]->profile();
      self.costs = agreements[rank]->my_costs();
    });
  }

  std::unique_ptr<Agreement> Make(int rank) {
    Rank& self = ranks[rank];
    Agreement::Options options;
    options.prefix = "poseidon.7";
    options.rank = rank;
    options.chooser.policy = policy;
    options.chooser.setting.size = kSize;
    options.chooser.dense.method = DenseMethod::kLazy;
    options.network = network;
    options.network_budget_seconds = 0.02;
    Agreement::Local local;
    local.tensors = [&self] { return self.tensors; };
    local.profile = [&self] { return self.profile; };
    local.costs = [&self](const MergedProfile& merged) {
      ++self.measured;
      ComputeCosts costs;
      costs.layers.resize(merged.tensors.size());
      costs.layers[0] = {self.seconds, self.seconds, 0, self.seconds};
      return costs;
    };
    local.question = [&self](const MergedProfile& merged, Question* question) {
      ++self.asked;
      question->may_share.assign(merged.tensors.size(), true);
      question->step = 5;
      question->reconstruct_threads = 2;
    };
    return std::make_unique<Agreement>(world.engines[rank].get(), std::move(options), std::move(local));
  }
};

TEST(AllRanksHoldRankZerosPlan) {
  World world;
  world.Agree();
  for (Rank& rank : world.ranks) {
    POSEIDON_REQUIRE_OK(rank.status);
    POSEIDON_CHECK_EQ(EncodePlan(rank.plan), EncodePlan(world.ranks[0].plan));
    POSEIDON_CHECK_EQ(rank.plan.decisions[0].scheme, Scheme::kSfb);
    POSEIDON_CHECK_EQ(rank.plan.made_at_step, 5);
    POSEIDON_CHECK_EQ(rank.plan.reconstruct_threads, 2);
    POSEIDON_CHECK_EQ(rank.merged.tensors[0].global_rows, 10 + 11 + 12);
    POSEIDON_CHECK_EQ(rank.measured, 1);
  }
  POSEIDON_CHECK(world.ranks[0].asked == 1 && world.ranks[1].asked == 0);
  // The median product, and not rank 0's, is in the seconds that the plan tells: transfer, and twice 2 ms.
  const double transfer = 1e-3 + 1e-7 * 33 * 2048 * 4;
  POSEIDON_CHECK_NEAR(world.ranks[0].plan.decisions[0].seconds(Scheme::kSfb), transfer + 2e-3, 1e-9);
  POSEIDON_CHECK_EQ(world.ranks[2].costs[0].local, 3e-3);  // its own
}

TEST(RankZeroRemembersWhatWasTried) {
  World world;
  world.Agree();
  const auto revise = [&](double seconds, bool forget) {
    for (Rank& rank : world.ranks) rank.profile.step_seconds = seconds;
    world.Agree(/*steps=*/40, forget);
    for (Rank& rank : world.ranks) POSEIDON_REQUIRE_OK(rank.status);
    return world.ranks[1].plan.decisions[0].scheme;
  };
  for (Rank& rank : world.ranks) rank.profile.first_step_seconds = 0.9;
  POSEIDON_CHECK_EQ(revise(4, false), Scheme::kAllreduce);     // factors disappoint, and the first step was faster
  POSEIDON_CHECK_EQ(revise(0.95, false), Scheme::kAllreduce);  // it is
  POSEIDON_CHECK_EQ(revise(1.0, true), Scheme::kSfb);          // forgotten: tried again
}

TEST(TheNetworkIsMeasuredOnceUnlessGiven) {
  World world;
  world.network = {};
  world.Agree();
  for (Rank& rank : world.ranks) {
    POSEIDON_REQUIRE_OK(rank.status);
    POSEIDON_CHECK(rank.plan.network.known());
  }
  const auto trials = [&] {
    int count = 0;
    for (const std::string& name : world.world.cluster.executed())
      count += name.find(".calibrate.") != std::string::npos;
    return count;
  };
  const int before = trials();
  POSEIDON_CHECK(before > 0);
  world.Agree(3);
  POSEIDON_CHECK_EQ(trials(), before);
}

TEST(ByBytesNothingIsMeasured) {
  World world;
  world.policy = Policy::kBytes;
  world.Agree();
  for (Rank& rank : world.ranks) {
    POSEIDON_REQUIRE_OK(rank.status);
    POSEIDON_CHECK_EQ(rank.measured, 0);
    POSEIDON_CHECK_EQ(rank.plan.decisions[0].scheme, Scheme::kSfb);
    POSEIDON_CHECK(!rank.plan.prediction.known && !rank.plan.network.known());
  }
}

// The same error on all ranks, and the same kind.
void CheckRefused(World* world, StatusCode code, const std::string& part) {
  world->Agree();
  for (Rank& rank : world->ranks) {
    POSEIDON_CHECK_EQ(rank.status.code(), code);
    POSEIDON_CHECK_CONTAINS(rank.status.message(), part);
    POSEIDON_CHECK_EQ(rank.status.message(), world->ranks[0].status.message());
  }
}

TEST(DifferencesAreRefusedOnAllRanks) {
  {
    World world;
    world.ranks[2].profile.tensors[2].shape = {11};
    CheckRefused(&world, StatusCode::kInvalidArgument, "[11]");
  }
  {
    World world;
    world.ranks[1].profile.settings_hash = 3;
    world.ranks[1].profile.settings_text = "policy=bytes";
    CheckRefused(&world, StatusCode::kInvalidArgument, "policy");
  }
  {
    World world;
    world.ranks[1].profile.tensors[2].sparse = true;
    CheckRefused(&world, StatusCode::kInvalidArgument, "scale");
  }
  {
    World world;  // a rank whose parameters are others than it told
    world.ranks[1].tensors[2].shape = {2, 5};
    CheckRefused(&world, StatusCode::kInvalidArgument, "Ranks 0 and 1 hold different communication plans");
  }
}

TEST(AFailedCollectiveEndsIt) {
  World world;
  for (int rank = 0; rank < kSize; ++rank) world.world.engines[rank]->Stop();
  world.Agree();
  for (Rank& rank : world.ranks) POSEIDON_CHECK_EQ(rank.status.code(), StatusCode::kAborted);
}

TEST(PlansAreLookedAtEverMoreSeldom) {
  PlanSchedule schedule;
  std::vector<int64_t> looked;
  for (int64_t step = 0; step < 220; ++step) {
    if (schedule.Due()) {
      looked.push_back(step);
      schedule.Made(/*trial=*/false);
    }
    schedule.Tick();
  }
  POSEIDON_CHECK_EQ(looked, std::vector<int64_t>{0, 3, 8, 18, 38, 78, 142, 206});
}

TEST(ATrialIsComparedSoonAndTheNextLater) {
  PlanSchedule schedule;
  for (int step = 0; step < 100; ++step) schedule.Tick();
  for (int64_t after : {4, 8, 12}) {
    schedule.Made(/*trial=*/true);
    for (int64_t step = 0; step < after; ++step) {
      POSEIDON_CHECK(!schedule.Due());
      POSEIDON_CHECK_EQ(schedule.DueWithin(3), after - step < 3);
      schedule.Tick();
    }
    POSEIDON_CHECK(schedule.Due());
  }
}

TEST(OtherRowsForFourStepsBringThePlanForward) {
  PlanSchedule schedule;
  schedule.Made(false);
  POSEIDON_CHECK(!schedule.AreOtherRows(0, 10) && !schedule.AreOtherRows(20, 10) && !schedule.AreOtherRows(5, 10));
  POSEIDON_CHECK(schedule.AreOtherRows(21, 10) && schedule.AreOtherRows(4, 10));
  POSEIDON_CHECK(schedule.NoteRows(true));
  POSEIDON_CHECK(!schedule.NoteRows(true) && !schedule.NoteRows(true));
  POSEIDON_CHECK(!schedule.NoteRows(false));  // a short batch
  for (int i = 0; i < 4; ++i) POSEIDON_CHECK_EQ(schedule.NoteRows(true), i == 0);
  POSEIDON_CHECK(schedule.Due() && schedule.rows_have_changed());
  schedule.PutOff();
  POSEIDON_CHECK(!schedule.Due());
}

}  // namespace
}  // namespace poseidon
