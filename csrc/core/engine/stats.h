// Counters and clocks. Plain values; whoever owns them guards them.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "core/schemes/registry.h"

namespace poseidon {

using Clock = std::chrono::steady_clock;

inline double SecondsBetween(Clock::time_point from, Clock::time_point to) {
  return from == Clock::time_point{} || to == Clock::time_point{} ? 0.0
                                                                  : std::chrono::duration<double>(to - from).count();
}

// When an exchange passed each stage; a stage that it does not have stays at the epoch.
struct ExchangeTimes {
  double pack_seconds = 0;          // copying into the message, before it was enqueued
  Clock::time_point enqueued;       // handed to the transport
  Clock::time_point wire_begin;     // negotiated, transfer starts (known for an allgather only)
  Clock::time_point wire_end;       // transfer complete
  Clock::time_point rebuild_begin;  // the engine thread starts on the result
  Clock::time_point rebuild_end;
  Clock::time_point done;
};

// What one exchange put on the wire.
struct WireCount {
  double bytes_sent = 0;  // payload bytes this rank sends in a ring, mean over ranks (cost_model.h)
  int64_t collectives = 0;
  double dense_bytes = 0;  // what a plain allreduce of the same gradients would have sent
};

// Sums per scheme over steps.
struct SchemeStats {
  int64_t tensors = 0;  // gradients exchanged
  int64_t collectives = 0;
  double bytes_sent = 0;
  double dense_bytes = 0;
  double waited_seconds = 0;  // training thread blocked in synchronize() with this scheme last to finish
  double pack_seconds = 0;
  double queue_seconds = 0;    // enqueue to start of transfer
  double wire_seconds = 0;     // transfer; for an allreduce queue and wire together
  double handoff_seconds = 0;  // transfer complete to engine thread starting
  double rebuild_seconds = 0;

  void Add(const ExchangeTimes& t, const WireCount& w, int64_t gradients) {
    tensors += gradients;
    collectives += w.collectives;
    bytes_sent += w.bytes_sent;
    dense_bytes += w.dense_bytes;
    pack_seconds += t.pack_seconds;
    queue_seconds += SecondsBetween(t.enqueued, t.wire_begin);
    wire_seconds += SecondsBetween(t.wire_begin == Clock::time_point{} ? t.enqueued : t.wire_begin, t.wire_end);
    handoff_seconds += SecondsBetween(t.wire_end, t.rebuild_begin);
    rebuild_seconds += SecondsBetween(t.rebuild_begin, t.rebuild_end);
  }
};

struct SessionStats {
  int64_t steps = 0;
  double synchronize_seconds = 0;
  int64_t dense_messages = 0;        // allreduces that the plan's layout asked for
  int64_t dense_in_place_bytes = 0;  // of gradients that were reduced where they lay
  int64_t dense_copied_bytes = 0;    // of those that were copied into a message first
  int64_t early_messages = 0;        // factors or rows sent from their layer's own backward node
  std::vector<SchemeStats> by_scheme = std::vector<SchemeStats>(SchemeCount());  // by the place in the registry

  SchemeStats& of(Scheme scheme) { return by_scheme.at(scheme.place()); }
  const SchemeStats& of(Scheme scheme) const { return by_scheme.at(scheme.place()); }
};

}  // namespace poseidon
