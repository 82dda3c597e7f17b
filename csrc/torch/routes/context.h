// What routes have in common: the engine, the options, what is in flight, and who takes part in the step.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/engine/engine.h"
#include "core/engine/stats.h"
#include "core/schemes/codec.h"
#include "torch/accumulator_hook.h"
#include "torch/options.h"

namespace poseidon {

class CaptureOwner;
class DenseSource;
class Membership;
class Progress;
class StepClock;
struct Parameter;

// What is on its way, and whose gradients it carries.
struct Sent {
  std::shared_ptr<Exchange> exchange;
  std::vector<Parameter*> members;
};

// Guarded by the session's mutex.
struct RouteContext {
  RouteContext(Mutex& its_mutex, std::shared_ptr<Engine> its_engine, const SessionOptions& its_options);

  Mutex& mutex;  // the session's
  const std::shared_ptr<Engine> engine;
  const SessionOptions& options;
  const WireFormat wire_format;
  Membership* membership = nullptr;
  Progress* progress = nullptr;
  StepClock* clock = nullptr;
  std::weak_ptr<CaptureOwner> owner;                 // who gets what layers capture
  std::weak_ptr<AccumulatorHook::Owner> hook_owner;  // and what accumulators tell
  SessionStats stats;
  std::vector<Sent> in_flight;  // and not collected
  bool gathers = false;         // some route does; for messages

  std::string WireName(const char* kind, const std::string& name) const;
  // With the rank, and what may be behind it.
  void ThrowIfFailed(const Status& status) const;
  void Submit(const std::shared_ptr<Exchange>& exchange, std::vector<Parameter*> members);
  // Admitted only: something else starts it.
  void Admit(const std::shared_ptr<Exchange>& exchange, std::vector<Parameter*> members);

  // Waits until all have ended, without the lock; the failure that came first.
  Status WaitFor(const std::vector<std::shared_ptr<Exchange>>& exchanges);
  // The same for those that carry nothing but members of which `chosen` is true; what has come is no longer in flight.
  Status Collect(const std::function<bool(const Parameter&)>& chosen);
  // By the user's compressor, without the lock: Python code, which may run a collective of its own.
  at::Tensor Decompress(const Parameter& parameter, const at::Tensor& received) const;
  // Their gradients are complete, or what stands for them.
  void NoteReady(const std::vector<Parameter*>& members);

  at::ScalarType DenseWireType(const Parameter& parameter) const;
  // Of a gradient that travels alone. With a factor of its own, unless the transport shall put messages together: what
  // it fuses depends on when it looks, and with it the order of sums and their last bits.
  Reduction ReductionOfOne(const Parameter& parameter) const;
  // The same for message `number` of the plan's layout.
  Reduction ReductionOfMessage(const Parameter& first, int number) const;
  // A message of the plan's layout has arrived.
  void CountMessage(const DenseSource& source, int64_t bytes, int64_t messages = 1);
};

}  // namespace poseidon
