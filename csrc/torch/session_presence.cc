// Session with uneven_steps: ranks that are in hvd.join() answer allreduces with zeros and cannot take part in a
// gather, so no rank may enqueue one before all know that none is missing. They count themselves once a step; if one is
// missing, everything is dense in that step.
#include <algorithm>
#include <utility>

#include "torch/session.h"
#include "torch/status_error.h"

namespace poseidon {

// Depends on agreed values alone, which do not change within a step before Flush().
bool Session::NeedsAllRanks() const {
  if (!options_.uneven_steps) return false;
  return PlanIsDue() || !factored_.empty() ||
         std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return p.sparse; });
}

// Once a step, when the first gradient is complete: from then on, and not before, a rank is bound to end the step. One
// that only computes a forward, or some of the backward passes, may still join.
void Session::AskWhoIsHere() {
  if (presence_ != Presence::kNotAsked || !NeedsAllRanks()) return;
  if (!ranks_here_ || ranks_here_->state() == Exchange::State::kInFlight) {  // left in flight by Reset
    ranks_here_ = std::make_shared<ScalarSum>(WireName("agree", "live"), options_.process_set, options_.size);
  }
  ranks_here_->SetValue(1);
  Submit(ranks_here_, {});
  presence_ = Presence::kAsked;
}

void Session::ReadWhoIsHere() {
  if (presence_ != Presence::kAsked || ranks_here_->state() != Exchange::State::kDone) return;
  presence_ = ranks_here_->sum() < options_.size ? Presence::kSomeAreMissing : Presence::kAllAreHere;
}

void Session::WaitForWhoIsHere() {
  AskWhoIsHere();
  if (presence_ == Presence::kNotAsked) return;
  ThrowIfFailed(engine_->Wait({ranks_here_}));
  ReadWhoIsHere();
}

// From every hook: asks, and sends what was held for the answer. Nothing else tells that it has come, until
// synchronize() waits for it.
void Session::FollowPresence(bool gradient_is_complete) {
  if (!options_.uneven_steps) return;
  if (gradient_is_complete) AskWhoIsHere();
  ReadWhoIsHere();
  if (presence_ != Presence::kAllAreHere && !SomeRankIsMissing()) return;
  for (Factored& factored : factored_) {
    if (factored.held) SendFactors(factored);
  }
}

bool Session::MayGather(Factored& factored) {
  if (!options_.uneven_steps) return true;
  ReadWhoIsHere();
  factored.held = presence_ == Presence::kNotAsked || presence_ == Presence::kAsked;
  if (SomeRankIsMissing()) SendWithoutFactors(factored);
  return presence_ == Presence::kAllAreHere;
}

void Session::SendWithoutFactors(const Factored& factored) {
  ThrowIfError(parameters_[factored.weight].layer->MakeDense());
  for (int index : {factored.weight, factored.bias}) {
    if (index >= 0) SendDense(parameters_[index]);
  }
}

// A gather otherwise. Its gradient stays sparse, also on a rank that has none.
void Session::SendSparseAsDense(Parameter& p) {
  at::Tensor& grad = p.tensor.mutable_grad();
  if (!grad.defined()) {
    std::vector<int64_t> no_rows = p.tensor.sizes().vec();
    no_rows[0] = 0;
    const auto options = p.tensor.options().requires_grad(false);
    grad = at::_sparse_coo_tensor_unsafe(at::empty({1, 0}, at::kLong), at::empty(no_rows, options), p.tensor.sizes(),
                                         options.layout(at::kSparse), /*is_coalesced=*/true);
  } else if (!grad.is_sparse()) {
    grad = grad.to_sparse(1);
  }
  SendDense(p);
}

// A parameter that is unfrozen is sent from then on, and a rank that has it alone would wait for the others for ever.
// So while some are frozen ranks compare once a step who wants a gradient, before any of them waits for one.
void Session::AskWhoWants() {
  if (!some_are_frozen_ || std::exchange(asked_who_wants_, true)) return;
  if (!who_wants_ || who_wants_->state() == Exchange::State::kInFlight) {  // left in flight by Reset
    who_wants_ = std::make_shared<Census>(WireName("agree", "active"), options_.process_set, options_.size);
  }
  std::vector<uint8_t> wants;
  for (const Parameter& p : parameters_) wants.push_back(p.active);
  who_wants_->SetHash(HashBytes(wants.data(), wants.size()));
  Submit(who_wants_, {});
}

void Session::CheckWhoWants() {
  AskWhoWants();
  if (!asked_who_wants_ || !who_wants_) return;
  ThrowIfFailed(engine_->Wait({who_wants_}));
  if (!who_wants_->complete() || !who_wants_->differs()) return;
  MergedProfile merged;
  const Status status = GatherProfiles("differ", &merged);  // says which parameter, on all ranks
  if (status.code() == StatusCode::kInvalidArgument) ThrowIfError(status);
  ThrowIfFailed(status);
}

double Session::SumOverRanks(const std::string& what, double value) {
  const Status status =
      poseidon::SumOverRanks(*engine_, WireName("agree", what), options_.process_set, options_.size, &value);
  std::lock_guard<std::mutex> lock(mutex_);
  ThrowIfFailed(status);
  return value;
}

}  // namespace poseidon
