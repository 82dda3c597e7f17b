// Plans of recorded profiles: what ranks 0 and 1 saw of the five models of bench/train.py, on other numbers of ranks,
// networks, policies and layouts, and of the grid of bench/selector.py. Each must be, byte for byte, the one in
// csrc/tests/plans/expected.txt. Where a change of the decision is wanted: POSEIDON_WRITE_PLANS=1 writes that file
// anew, and its difference shows which choices changed.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "core/base/byte_io.h"
#include "tests/check.h"
#include "tests/core/recorded_plans.h"

namespace poseidon {
namespace {

const std::string kFolder = POSEIDON_RECORDED_PLANS;

struct Variant {
  const char* policy;
  const char* dense;
  bool half;
};
constexpr Variant kVariants[] = {
    {"time", "auto", false},  {"time", "auto", true},   {"time", "horovod", false},   {"time", "lazy", false},
    {"bytes", "auto", false}, {"sfb", "merged", false}, {"allreduce", "auto", false}, {"allreduce", "priority", false}};

struct Link {
  const char* name;
  double bits_per_second, latency;
};
constexpr Link kLinks[] = {
    {"50mbit", 50e6, 5e-3}, {"200mbit", 200e6, 1e-3}, {"1000mbit", 1e9, 2e-4}, {"10gbit", 1e10, 5e-5}};

// A ring of `size` ranks.
NetworkModel NetworkOf(const Link& link, int size) {
  const double hops = size - 1, share = hops / size, byte = 8 / link.bits_per_second;
  NetworkModel network;
  network.allreduce = {2 * hops * link.latency, 2 * share * byte};
  network.allgather = {hops * link.latency, share * byte};
  return network;
}

std::vector<std::string> Models() { return {"alexnet", "dlrm", "mlp", "resnet50", "transformer"}; }

// Four plans in a row; the steps between take what the plan before predicts, times a factor. 2.5 is beyond what the
// model explains by a slower network.
std::string PlansInARow(const Record& record, Settings settings) {
  Planner planner(settings);
  MergedProfile profile = Merge(record, settings.size);
  profile.step_seconds = 0;
  std::string text;
  for (double factor : {1.3, 0.8, 2.5, 1.0}) {
    const Plan plan = planner.Make(profile, record);
    text += PlanText(plan);
    profile.step_seconds = plan.prediction.known ? factor * plan.prediction.chosen.step : 0;
  }
  return text;
}

void AddModels(std::map<std::string, std::string>* plans) {
  for (const std::string& model : Models()) {
    const Record record = ReadRecord(kFolder + "/" + model + ".profile");
    for (int size : {2, 4, 8}) {
      for (const Link& link : kLinks) {
        for (const Variant& variant : kVariants) {
          Settings settings;
          settings.size = size;
          settings.half = variant.half;
          settings.network = NetworkOf(link, size);
          POSEIDON_REQUIRE_OK(ParsePolicy(variant.policy, &settings.policy));
          POSEIDON_REQUIRE_OK(ParseDense(variant.dense, &settings.dense));
          const std::string name = model + " " + std::to_string(size) + " " + link.name + " " + variant.policy + " " +
                                   variant.dense + (variant.half ? " half" : "");
          (*plans)[name] = PlansInARow(record, settings);
        }
      }
    }
  }
}

// A layer of bench/cells.py on a core of 40 GFLOP/s.
Record Cell(int64_t m, int64_t n, int64_t rows, int ranks) {
  const double product = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(rows) / 40e9;
  Record record;
  RankProfile profile;
  TensorProfile weight;
  weight.name = "0.weight";
  weight.shape = {m, n};
  weight.is_linear_weight = weight.used = weight.complete = weight.sfb_allowed = true;
  weight.bias = "0.bias";
  weight.rows = rows;
  weight.calls = 1;
  weight.ready_seconds = 2 * product + 1e-4;
  weight.order = 0;
  TensorProfile bias;
  bias.name = "0.bias";
  bias.shape = {m};
  bias.used = bias.complete = true;
  bias.ready_seconds = weight.ready_seconds;
  bias.order = 1;
  bias.reason = "it is no matrix";
  profile.tensors = {weight, bias};
  profile.compute_seconds = 3 * product + 1e-4;
  profile.first_step_seconds = 4 * product + 1;
  record.by_rank = {profile};
  record.may_share = {true, true};
  record.costs.contention = 0.5;
  record.costs.copy = 2e-10;
  record.costs.layers.resize(2);
  record.costs.layers[0] = {product, product, 1e-10 * static_cast<double>((m + n) * rows), product * ranks};
  return record;
}

void AddCells(std::map<std::string, std::string>* plans) {
  for (int size : {2, 4, 8}) {
    for (const Link& link : kLinks) {
      for (int64_t width : {64, 256, 1024, 4096, 8192}) {
        for (int64_t rows : {1, 8, 32, 128, 512}) {
          Settings settings;
          settings.policy = Policy::kTime;
          settings.size = size;
          settings.network = NetworkOf(link, size);
          const std::string name = "cell " + std::to_string(width) + " " + std::to_string(rows) + " " +
                                   std::to_string(size) + " " + link.name;
          (*plans)[name] = PlansInARow(Cell(width, width, rows, size), settings);
        }
      }
    }
  }
}

// "NAME: HASH SUMMARY", the summary for who reads a difference.
std::string LineOf(const std::string& name, const std::string& text) {
  char hash[24];
  std::snprintf(hash, sizeof(hash), "%016llx", static_cast<unsigned long long>(HashBytes(text.data(), text.size())));
  return name + ": " + hash + Summary(text);
}

TEST(RecordedProfilesGiveTheRecordedPlans) {
  std::map<std::string, std::string> plans;
  AddModels(&plans);
  AddCells(&plans);
  const std::string path = kFolder + "/expected.txt";
  if (std::getenv("POSEIDON_WRITE_PLANS") != nullptr) {
    std::ofstream out(path);
    for (const auto& [name, text] : plans) out << LineOf(name, text) << "\n";
    return;
  }
  if (const char* wanted = std::getenv("POSEIDON_SHOW_PLANS")) std::printf("%s\n", plans[wanted].c_str());
  std::ifstream in(path);
  POSEIDON_REQUIRE(in.good());
  size_t lines = 0;
  for (std::string line; std::getline(in, line); ++lines) {
    const std::string name = line.substr(0, line.find(": "));
    POSEIDON_REQUIRE(plans.count(name) == 1);
    POSEIDON_CHECK_EQ(LineOf(name, plans[name]), line);
  }
  POSEIDON_CHECK_EQ(lines, plans.size());
}

}  // namespace
}  // namespace poseidon
