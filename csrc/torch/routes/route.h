// How the gradients of one or several parameters get from .grad to the reduced .grad.
//
// The session counts passes, asks who is here and checks evidence; then it hands the gradient to its parameter's route.
// A route is made by the router (router.h) from the plan, and names what it sends. All methods are called with the
// session's lock held. They throw (status_error.h).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/engine/exchange.h"
#include "core/engine/stats.h"
#include "torch/parameter.h"
#include "torch/routes/context.h"

namespace poseidon {

class Route : public std::enable_shared_from_this<Route> {
 public:
  Route(RouteContext& context, std::vector<Parameter*> members) : context_(context), members_(std::move(members)) {}
  virtual ~Route() = default;
  Route(const Route&) = delete;
  Route& operator=(const Route&) = delete;

  // Those whose gradients travel together, so that they are sent and waited for together.
  const std::vector<Parameter*>& members() const { return members_; }
  // Sends a sparse gradient as a dense one, whatever other ranks have. Otherwise it waits until ranks agree that it is
  // sparse.
  virtual bool makes_dense() const { return false; }
  // Takes part in gathers, for which no rank may be missing (hvd.join()).
  virtual bool gathers() const { return false; }

  // A backward pass has reached a member in that walk. False: nothing but .grad counts. True: the route has taken the
  // pass, and the following is not for it.
  virtual bool OnPass(Parameter&, int /*walk*/) { return false; }
  // The member's gradient is complete in .grad. fresh: autograd has made it in this pass.
  virtual void OnComplete(Parameter& member, bool fresh) = 0;
  // The step ends, and the member has not been sent: it goes now, with zeros or no rows for what is missing.
  virtual void Flush(Parameter& member) = 0;
  // What carries the member has arrived: makes the result visible, on the training thread.
  virtual Status Finish(Parameter& member) = 0;
  // It has become known whether all ranks take part in this step.
  virtual void OnMembership() {}
  // The step is over; nothing of it is in flight.
  virtual void EndStep() {}

  // The step is abandoned. Whatever is in flight keeps its buffers, and the one returned takes over for its members;
  // itself if nothing is.
  virtual std::shared_ptr<Route> Successor() = 0;
  // Replaced by another route, between steps.
  virtual void Retire() {}

  // ---- After a step in which all ranks took part: the same on all ranks.
  // Why it cannot go on; empty if it can.
  virtual std::string Objection() const { return ""; }
  // Rows that were gathered; -1 if it gathers none.
  virtual int64_t GatheredRows() const { return -1; }
  virtual void CountStep(SessionStats*) const {}

  // ---- For the clock: what the route did to the backward pass.
  // The exchange whose rebuilding shares cores with backward.
  virtual const Exchange* Rebuilds() const { return nullptr; }
  // Bytes of the member that were copied into a message in this step.
  virtual double CopiedBytes(const Parameter&) const { return 0; }

 protected:
  static bool InFlight(const Exchange* exchange) {
    return exchange != nullptr && exchange->state() == Exchange::State::kInFlight;
  }

  RouteContext& context_;

 private:
  const std::vector<Parameter*> members_;
};

}  // namespace poseidon
