// What a plan says of one tensor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/schemes/scheme.h"

namespace poseidon {

// How a tensor could travel. For the report: what a planner counts with is Work (core/model/work.h).
struct Offer {
  Scheme scheme;
  double bytes = 0;      // sent by one rank in one step, mean over ranks (cost_model.h)
  double seconds = -1;   // transfer and this tensor's own work, nothing hidden; negative: not known
  std::string obstacle;  // why it cannot be; empty if it can
};

struct TensorDecision {
  std::string name;
  Scheme scheme;
  std::vector<Offer> offers;     // of the schemes that can carry it; and allreduce's, even if it cannot
  int64_t global_rows = 0;       // seen in the profiling step
  std::string reason;            // why this scheme, for the report
  bool request_refused = false;  // the user asked for another scheme, which cannot be: the caller warns with `reason`

  // Null if there is none.
  const Offer* OfferOf(Scheme wanted) const {
    const auto it = std::find_if(offers.begin(), offers.end(), [&](const Offer& o) { return o.scheme == wanted; });
    return it == offers.end() ? nullptr : &*it;
  }
  // Negative if there is no such offer, as seconds if they are not known.
  double bytes(Scheme wanted) const {
    const Offer* offer = OfferOf(wanted);
    return offer == nullptr ? -1 : offer->bytes;
  }
  double seconds(Scheme wanted) const {
    const Offer* offer = OfferOf(wanted);
    return offer == nullptr ? -1 : offer->seconds;
  }

  // Replaces the offer of that scheme, or adds it.
  void Put(Offer offer) {
    Remove(offer.scheme);
    offers.push_back(std::move(offer));
  }
  void Remove(Scheme unwanted) {
    offers.erase(
        std::remove_if(offers.begin(), offers.end(), [&](const Offer& offer) { return offer.scheme == unwanted; }),
        offers.end());
  }
};

}  // namespace poseidon
