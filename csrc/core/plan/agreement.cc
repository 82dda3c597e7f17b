#include "core/plan/agreement.h"

#include <utility>

#include "core/engine/gather_bytes.h"
#include "core/model/network_calibration.h"

namespace poseidon {

Agreement::Agreement(Engine* engine, Options options, Local local)
    : engine_(engine), options_(std::move(options)), local_(std::move(local)) {
  measured_.network = options_.network;
  measured_.network_given = options_.network.known();
}

bool Agreement::by_time() const { return GoesByTime(options_.chooser.policy, options_.chooser.dense.method); }

Status Agreement::Gather(const std::string& which, const std::vector<uint8_t>& mine,
                         std::vector<std::vector<uint8_t>>* all) {
  return GatherBytes(*engine_, options_.prefix + ".agree." + which, options_.process_set, options_.chooser.setting.size,
                     mine, all);
}

Status Agreement::GatherProfiles(const std::string& which, bool first, MergedProfile* merged) {
  std::vector<std::vector<uint8_t>> gathered;
  Status status = Gather(which, EncodeProfile(local_.profile()), &gathered);
  if (!status.ok()) return status;
  std::vector<RankProfile> by_rank(gathered.size());
  for (size_t rank = 0; rank < gathered.size(); ++rank) {
    status = DecodeProfile(gathered[rank].data(), gathered[rank].size(), &by_rank[rank]);
    if (!status.ok()) {
      return Status::Internal("the profile of rank " + std::to_string(rank) + " cannot be read (" + status.message() +
                              "); is the same version of poseidon_hvd installed on every host?");
    }
  }
  status = MergeProfiles(by_rank, merged);  // the same verdict, and the same error, on every rank
  if (status.ok() && first) status = CompareLayouts(by_rank);
  const size_t mine = local_.tensors().size();
  if (status.ok() && merged->tensors.size() != mine) {
    return Status::Internal("the profiles of " + std::to_string(merged->tensors.size()) +
                            " parameters were gathered, there are " + std::to_string(mine) +
                            "; install the same version of poseidon_hvd on every rank");
  }
  return status;
}

Status Agreement::Agree(const Plan& in_force, int64_t steps, bool forget, Plan* plan) {
  Status status = GatherProfiles("profile", /*first=*/in_force.decisions.empty(), &profile_);
  if (status.ok() && by_time() && options_.chooser.setting.size > 1) status = Measure();
  if (!status.ok()) return status;
  return Receive(options_.rank == 0 ? Decide(in_force, steps, forget) : std::vector<uint8_t>{}, plan);
}

// What has not been measured yet. Which network trials run depends on agreed values alone.
Status Agreement::Measure() {
  if (!measured_.network.known()) {
    CalibrationOptions calibration;
    calibration.name_prefix = options_.prefix + ".calibrate.network";
    calibration.process_set = options_.process_set;
    calibration.size = options_.chooser.setting.size;
    if (options_.network_budget_seconds > 0) calibration.budget_seconds = options_.network_budget_seconds;
    Status status = MeasureNetwork(*engine_, calibration, &measured_.network);
    if (!status.ok()) return status;
  }
  const ComputeCosts mine = local_.costs(profile_);
  my_costs_ = mine.layers;
  std::vector<std::vector<uint8_t>> gathered;
  Status status = Gather("costs", EncodeCosts(mine), &gathered);
  if (!status.ok()) return status;
  std::vector<ComputeCosts> by_rank(gathered.size());
  for (size_t rank = 0; rank < gathered.size(); ++rank) {
    status = DecodeCosts(gathered[rank], profile_.tensors.size(), &by_rank[rank]);
    if (!status.ok()) return Status::Internal("rank " + std::to_string(rank) + ": " + status.message());
  }
  ComputeCosts costs = MedianCosts(by_rank);
  measured_.contention = costs.contention;
  measured_.copy = costs.copy;
  measured_.costs = std::move(costs.layers);
  return Status::OK();
}

std::vector<uint8_t> Agreement::Decide(const Plan& in_force, int64_t steps, bool forget) {
  if (forget) trials_.Forget();
  if (by_time()) trials_.Observe(in_force.decisions, in_force.slices, profile_.step_seconds, steps);
  Question question;
  question.profile = profile_;
  question.measured = measured_;
  local_.question(profile_, &question);
  return EncodePlan(Choose(question, options_.chooser, &trials_));
}

// mine: rank 0's plan; empty on the others.
Status Agreement::Receive(const std::vector<uint8_t>& mine, Plan* plan) {
  std::vector<std::vector<uint8_t>> gathered;
  Status status = Gather("plan", mine, &gathered);
  if (!status.ok()) return status;
  status = DecodePlan(gathered[0].data(), gathered[0].size(), plan);
  if (!status.ok()) return Status::Internal("the plan of rank 0 cannot be read: " + status.message());
  const std::vector<LocalTensor> tensors = local_.tensors();
  status = CheckPlan(*plan, options_.chooser.setting.size, tensors);
  if (!status.ok()) return status;
  const uint64_t hash = HashPlan(gathered[0], tensors);
  std::vector<uint8_t> hash_bytes(sizeof(hash));
  for (size_t i = 0; i < sizeof(hash); ++i) hash_bytes[i] = static_cast<uint8_t>(hash >> (8 * i));
  status = Gather("hash", hash_bytes, &gathered);
  if (!status.ok()) return status;
  for (size_t rank = 1; rank < gathered.size(); ++rank) {
    if (gathered[rank] == gathered[0]) continue;
    return Status::InvalidArgument(
        "Ranks 0 and " + std::to_string(rank) +
        " hold different communication plans, so they would wait for each other for ever. All ranks must build the "
        "same model and wrap the same parameters in the same order.");
  }
  return Status::OK();
}

}  // namespace poseidon
