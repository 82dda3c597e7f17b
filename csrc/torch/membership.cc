#include "torch/membership.h"

#include <utility>

#include "core/plan/plan.h"

namespace poseidon {

void Membership::Ask() {
  if (presence_ != Presence::kNotAsked) return;
  if (!ranks_here_ || ranks_here_->state() == Exchange::State::kInFlight) {  // left in flight by Reset
    const SessionOptions& options = context_.options;
    ranks_here_ = std::make_shared<ScalarSum>(context_.WireName("agree", "live"), options.process_set, options.size);
  }
  ranks_here_->SetValue(1);
  context_.Submit(ranks_here_, {});
  presence_ = Presence::kAsked;
}

void Membership::Read() {
  if (presence_ != Presence::kAsked || ranks_here_->state() != Exchange::State::kDone) return;
  presence_ = ranks_here_->sum() < context_.options.size ? Presence::kSomeAreMissing : Presence::kAllAreHere;
  known_();
}

void Membership::Wait() {
  Ask();
  const std::shared_ptr<Exchange> asked = ranks_here_;
  context_.ThrowIfFailed(context_.WaitFor({asked}));
  Read();
}

void Membership::AskWhoWants(const std::vector<Parameter>& parameters) {
  if (!some_are_frozen_ || std::exchange(asked_who_wants_, true)) return;
  if (!who_wants_ || who_wants_->state() == Exchange::State::kInFlight) {  // left in flight by Reset
    const SessionOptions& options = context_.options;
    who_wants_ = std::make_shared<Census>(context_.WireName("agree", "active"), options.process_set, options.size);
  }
  std::vector<uint8_t> wants;
  for (const Parameter& p : parameters) wants.push_back(p.active);
  who_wants_->SetHash(HashBytes(wants.data(), wants.size()));
  context_.Submit(who_wants_, {});
}

bool Membership::WantsDiffer() {
  if (!asked_who_wants_ || !who_wants_) return false;
  const std::shared_ptr<Census> asked = who_wants_;
  context_.ThrowIfFailed(context_.WaitFor({asked}));
  return asked->complete() && asked->differs();
}

void Membership::EndStep() {
  asked_who_wants_ = false;
  presence_ = Presence::kNotAsked;
}

}  // namespace poseidon
