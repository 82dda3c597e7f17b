// The choice of a scheme per tensor by rules: what the user asked for, what is possible, which sends fewer bytes. What
// goes by time starts from it (chooser.h). Pure functions, any thread.
#pragma once

#include <vector>

#include "core/plan/decision.h"
#include "core/plan/offers.h"

namespace poseidon {

// Rules, first match wins. "Plain" is allreduce, or the transport's sparse allgather for a sparse gradient; "concerns"
// is SchemeRule::Concerns.
//
//   sparse, and no other scheme concerns it                 -> plain
//   one rank                                                -> plain
//   override: a scheme that is possible                     -> that one
//   override: a scheme that is not                          -> plain; refused
//   policy kAllreduce                                       -> plain
//   no other scheme that concerns it is possible            -> plain; the reason says why
//   policy kSfb                                             -> the first of them in the order of the registry
//   policies kBytes and, to begin with, kTime               -> the one that sends fewest bytes, if not more than plain
//
// The last is BestScheme of Poseidon (section 3.2), with its `<=`, for the weight matrix alone: a bias is small and
// would be on both sides. A scheme that the profiled step did not measure (no rows) is not compared: plain. A lossy
// scheme is taken only where an override names it.
TensorDecision DecideByRules(const MergedTensor& tensor, SchemeOverride wish, Policy policy, const Setting& setting,
                             const std::vector<PricedOffer>& offers);

}  // namespace poseidon
