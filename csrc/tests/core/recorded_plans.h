// Recorded profiles, and rank 0's way from a profile to a plan without a session.
#pragma once

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "core/base/byte_io.h"
#include "core/model/measurements.h"
#include "core/plan/chooser.h"
#include "core/plan/plan.h"
#include "core/plan/profile.h"
#include "core/plan/trials.h"
#include "horovod/traits.h"
#include "tests/check.h"

namespace poseidon {

// What rank 0 knew when it made a plan: a file of blocks, each with its length in front (4 bytes, little-endian). The
// number of ranks, without a length; each rank's EncodeProfile; EncodeCosts of the agreed costs; a byte per parameter,
// whether its gradient may share a message.
struct Record {
  std::vector<RankProfile> by_rank;
  ComputeCosts costs;
  std::vector<bool> may_share;
};

inline Record ReadRecord(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  POSEIDON_REQUIRE(in.good());
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  ByteReader reader(bytes.data(), bytes.size());
  const auto block = [&] {
    const std::string text = reader.ReadString();
    return std::vector<uint8_t>(text.begin(), text.end());
  };
  Record record;
  record.by_rank.resize(reader.ReadU32());
  for (RankProfile& profile : record.by_rank) {
    const std::vector<uint8_t> encoded = block();
    POSEIDON_REQUIRE_OK(DecodeProfile(encoded.data(), encoded.size(), &profile));
  }
  const size_t tensors = record.by_rank[0].tensors.size();
  POSEIDON_REQUIRE_OK(DecodeCosts(block(), tensors, &record.costs));
  for (uint8_t byte : block()) record.may_share.push_back(byte != 0);
  POSEIDON_REQUIRE(reader.Finished() && record.may_share.size() == tensors);
  return record;
}

// Of more ranks than were recorded: they take turns.
inline MergedProfile Merge(const Record& record, int size) {
  std::vector<RankProfile> by_rank;
  for (int rank = 0; rank < size; ++rank) by_rank.push_back(record.by_rank[rank % record.by_rank.size()]);
  MergedProfile profile;
  POSEIDON_REQUIRE_OK(MergeProfiles(by_rank, &profile));
  return profile;
}

struct Settings {
  Policy policy = Policy::kTime;
  int size = 2;
  bool half = false;
  DenseSettings dense;
  NetworkModel network;
};

// Plans in a row, each tried for four steps.
class Planner {
 public:
  explicit Planner(const Settings& given) {
    settings_.policy = given.policy;
    settings_.setting.size = given.size;
    settings_.setting.wire.traits = HorovodTraits();
    if (given.half) settings_.setting.wire.codec = &HalfCodec();
    settings_.dense = given.dense;
    network_ = given.network;
  }

  Plan Make(const MergedProfile& profile, const Record& record) {
    Question question;
    question.profile = profile;
    question.measured = {network_, false, record.costs.contention, record.costs.copy, record.costs.layers};
    question.may_share = record.may_share;
    trials_.Observe(current_.decisions, current_.slices, profile.step_seconds, /*steps=*/4);
    current_ = Choose(question, settings_, &trials_);
    return current_;
  }

 private:
  ChooserSettings settings_;
  NetworkModel network_;
  Trials trials_;
  Plan current_;
};

inline std::string NumberText(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), " %.12g", value);
  return text;
}
inline std::string KnownText(double value) { return value < 0 ? " none" : NumberText(value); }

inline std::string DecisionText(const TensorDecision& decision) {
  const double gather =
      decision.OfferOf(Scheme::kSfb) != nullptr ? decision.seconds(Scheme::kSfb) : decision.seconds(Scheme::kRowSparse);
  return decision.name + " " + Name(decision.scheme) + NumberText(decision.bytes(Scheme::kAllreduce)) +
         KnownText(decision.bytes(Scheme::kSfb)) + KnownText(decision.bytes(Scheme::kRowSparse)) +
         KnownText(decision.seconds(Scheme::kAllreduce)) + KnownText(gather) + " " +
         std::to_string(decision.global_rows) + " " + decision.reason + (decision.request_refused ? " refused" : "") +
         "\n";
}

// All that plan() of Python has of a plan.
inline std::string PlanText(const Plan& plan) {
  std::string text = "ranks " + std::to_string(plan.size) + "\n";
  for (const TensorDecision& decision : plan.decisions) text += DecisionText(decision);
  text += std::string("slices ") + Name(plan.dense_method);
  for (const DenseSlice& slice : plan.slices) {
    text += " |";
    for (int tensor : slice.tensors) text += " " + std::to_string(tensor);
    if (slice.parts > 1) text += " part " + std::to_string(slice.part) + "/" + std::to_string(slice.parts);
  }
  text += "\nload" + NumberText(plan.prediction.load.allreduce) + NumberText(plan.prediction.load.allgather) + "\n";
  if (!plan.prediction.known) return text + "not predicted\n";
  for (const StepEstimate* each : {&plan.prediction.chosen, &plan.prediction.dense}) {
    text += each == &plan.prediction.chosen ? "chosen" : "dense";
    for (double value : {each->step, each->exposed(), each->channel, each->rebuild}) text += NumberText(value);
    text += "\n";
  }
  return text;
}

inline int CountOf(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

// Of several plans in a row: how many tensors are factored, how many messages the layout has, the predicted steps.
inline std::string Summary(const std::string& plans) {
  std::string summary;
  for (size_t at = 0; at < plans.size();) {
    const size_t next = plans.find("ranks ", at + 1);
    const std::string plan = plans.substr(at, next - at);
    const std::string slices = plan.substr(plan.find("\nslices "), plan.find("\nload") - plan.find("\nslices "));
    const size_t chosen = plan.find("\nchosen ");
    char step[16] = "-";
    if (chosen != std::string::npos)
      std::snprintf(step, sizeof(step), "%.3gs", std::strtod(&plan[chosen + 8], nullptr));
    summary += ", " + std::to_string(CountOf(plan, " sfb ")) + "+" + std::to_string(CountOf(plan, " row-sparse ")) +
               "/" + std::to_string(CountOf(slices, "|")) + " " + step;
    at = next == std::string::npos ? plans.size() : next;
  }
  return summary;
}

}  // namespace poseidon
