#include "core/plan/selector.h"

#include <string>

namespace poseidon {
namespace {

constexpr const char* kSparse = " was asked for but the gradient is sparse";
constexpr const char* kCannotBe = " was asked for but cannot be: ";

// One tensor's way through the rules.
class Rules {
 public:
  Rules(const MergedTensor& tensor, const Setting& setting, const std::vector<PricedOffer>& offers,
        TensorDecision* decision)
      : tensor_(tensor), setting_(setting), offers_(offers), decision_(*decision) {}

  void Decide(SchemeOverride wish, Policy policy) {
    decision_.scheme = offers_.front().scheme;
    if (tensor_.sparse && Others().empty()) {
      decision_.request_refused = !wish.is_auto();
      decision_.reason = wish.is_auto() ? "sparse gradient" : Name(wish) + std::string(kSparse);
    } else if (setting_.size <= 1) {
      decision_.reason = "one rank";
    } else if (!wish.is_auto()) {
      Follow(wish.scheme());
    } else if (policy == Policy::kAllreduce) {
      decision_.reason = tensor_.sparse ? "sparse gradient" : "policy: allreduce";
    } else if (const PricedOffer* first = FirstPossible(); first == nullptr) {
      Refrain(policy);
    } else if (policy == Policy::kSfb) {
      Take(*first, "policy: sfb");
    } else {
      ByBytes();
    }
  }

 private:
  std::vector<const PricedOffer*> Others() const {
    std::vector<const PricedOffer*> others;
    for (const PricedOffer& offer : offers_) {
      if (!RuleOf(offer.scheme).plain()) others.push_back(&offer);
    }
    return others;
  }

  // That need not be asked for.
  const PricedOffer* FirstPossible() const {
    for (const PricedOffer* offer : Others()) {
      if (offer->obstacle.empty() && !RuleOf(offer->scheme).lossy()) return offer;
    }
    return nullptr;
  }

  void Take(const PricedOffer& offer, std::string reason) {
    decision_.scheme = offer.scheme;
    decision_.reason = std::move(reason);
  }

  // Of what the user asked for. A pattern that means layers, or tables, may match a bias, which follows its weight:
  // nothing to warn of.
  void Follow(Scheme wish) {
    const SchemeRule& rule = RuleOf(wish);
    const std::string obstacle = rule.Obstacle(tensor_, setting_);
    if (obstacle.empty()) {
      decision_.scheme = wish;
      decision_.reason = std::string("override: ") + rule.name();
    } else if (rule.plain()) {
      decision_.request_refused = true;
      decision_.reason = rule.name() + std::string(kSparse);
    } else {
      decision_.request_refused = tensor_.base.shape.size() > 1;
      const bool bias = rule.Concerns(tensor_) && !decision_.request_refused;
      decision_.reason = bias ? obstacle : std::string("override: ") + rule.name() + kCannotBe + obstacle;
    }
  }

  // "Wherever it is possible" of policy kSfb: that a convolution is not a linear weight is nothing to warn of.
  void Refrain(Policy policy) {
    const PricedOffer* first = nullptr;
    for (const PricedOffer* offer : Others()) {
      if (first == nullptr && !RuleOf(offer->scheme).lossy()) first = offer;
    }
    if (first == nullptr) {
      decision_.reason = "no other scheme carries it";
      return;
    }
    decision_.request_refused = policy == Policy::kSfb && RuleOf(first->scheme).Promised(tensor_);
    decision_.reason = decision_.request_refused ? std::string("policy: ") + Name(policy) + kCannotBe + first->obstacle
                                                 : first->obstacle;
  }

  void ByBytes() {
    const PricedOffer* best = nullptr;
    double fewest = 0;
    for (const PricedOffer* offer : Others()) {
      const SchemeRule& rule = RuleOf(offer->scheme);
      if (!offer->obstacle.empty() || rule.lossy() || !rule.Measured(tensor_)) continue;
      const double bytes = SentBytes(offer->work, setting_.size);
      if (best != nullptr && bytes >= fewest) continue;
      best = offer;
      fewest = bytes;
    }
    if (best == nullptr) {
      decision_.reason = "no rows in the profiling step";
      return;
    }
    const double otherwise = SentBytes(offers_.front().work, setting_.size);
    if (fewest <= otherwise) decision_.scheme = best->scheme;
    decision_.reason = RuleOf(best->scheme).ReasonByBytes(tensor_, setting_, otherwise);
  }

  const MergedTensor& tensor_;
  const Setting& setting_;
  const std::vector<PricedOffer>& offers_;
  TensorDecision& decision_;
};

}  // namespace

TensorDecision DecideByRules(const MergedTensor& tensor, SchemeOverride wish, Policy policy, const Setting& setting,
                             const std::vector<PricedOffer>& offers) {
  TensorDecision decision;
  decision.name = tensor.base.name;
  decision.global_rows = tensor.global_rows;
  const SchemeRule& allreduce = RuleOf(Scheme::kAllreduce);
  decision.offers.push_back({Scheme::kAllreduce, SentBytes(allreduce.WorkOf(tensor, {}, setting), setting.size), -1,
                             allreduce.Obstacle(tensor, setting)});
  for (const PricedOffer& offer : offers) {
    if (!offer.obstacle.empty() || offer.scheme == Scheme::kAllreduce) continue;
    decision.offers.push_back({offer.scheme, SentBytes(offer.work, setting.size), -1, ""});
  }
  Rules(tensor, setting, offers, &decision).Decide(wish, policy);
  return decision;
}

}  // namespace poseidon
