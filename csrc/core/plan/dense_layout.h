// How the gradients that are allreduced are put together into messages ("slices"): one large gradient alone, in place,
// or several small ones that lie side by side in one buffer. A static layout: it depends on agreed values alone, so
// every rank sends the same messages, and with a fixed theta it is the same from run to run. Pure functions, any
// thread.
//
// Sources: lazy allreduce is GradientFlow's (arXiv 1902.06855, section 3.1), merging by ready times MG-WFBP's (arXiv
// 1811.11141, algorithm 1), parts sent by priority with bounded credit ByteScheduler's (SOSP 2019).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/model/alpha_beta.h"
#include "core/plan/tuning.h"

namespace poseidon {

enum class DenseMethod : uint8_t {
  kFused,     // "horovod": no slices, every gradient by itself, put together by the transport as it finds them
  kBsp,       // everything in one message, after backward
  kWfbp,      // every gradient in a message of its own, as soon as it is complete
  kMerged,    // MG-WFBP
  kPriority,  // parts of at most theta bytes, those of front layers first, a bounded number of bytes in flight
  kLazy,      // gradients in the order of backward, a message for every theta bytes
  kAuto,      // the layout that makes the predicted step shortest
};

struct DenseSettings {
  DenseMethod method = DenseMethod::kAuto;
  int64_t theta = 4 << 20;  // bytes
};

const char* Name(DenseMethod method);
// "auto", "lazy", "lazy:1000000", ...; the number is theta, from 1 to 1e12, for lazy and priority. As the other Parse
// functions (scheme.h).
Status ParseDense(const std::string& text, DenseSettings* out);

struct DenseTensor {
  int index = 0;     // of the parameter
  double bytes = 0;  // on the wire
  double ready = 0;  // seconds from the step's beginning
  uint8_t kind = 0;  // the wire dtype: a slice has one
};

// Either whole gradients, side by side in this order, or one part of one gradient.
struct DenseSlice {
  std::vector<int> tensors;
  int part = 0;
  int parts = 1;

  bool operator==(const DenseSlice& other) const {
    return tensors == other.tensors && part == other.part && parts == other.parts;
  }
};

// Any number is taken for the nearest one within bounds (bounds.h), NaN for the least, so every tensor is in one slice,
// or one slice per part.

// Tensors in the order of backward. theta bytes or more, or with `alone` so many: alone, in place.
std::vector<DenseSlice> LayOutLazily(const std::vector<DenseTensor>& tensors, double theta);
std::vector<DenseSlice> LayOutLazily(const std::vector<DenseTensor>& tensors, double theta, double alone);
// A gradient waits for the next one if that comes less than alpha after its own message could start.
std::vector<DenseSlice> LayOutMerged(const std::vector<DenseTensor>& tensors, const AlphaBeta& allreduce);
// In the order in which they are sent: always, of what is complete by then, what was completed last in backward, which
// the next forward needs first. Not more than kMostParts parts beyond one per gradient: a smaller theta makes parts of
// another size.
constexpr int kMostParts = 2048;
std::vector<DenseSlice> LayOutByPriority(const std::vector<DenseTensor>& tensors, double theta,
                                         const AlphaBeta& allreduce);
// For every method but kAuto.
std::vector<DenseSlice> LayOut(const DenseSettings& settings, const std::vector<DenseTensor>& tensors,
                               const AlphaBeta& allreduce);
// What kAuto chooses from. networks: for each, what LayOutMerged makes of it is among them.
std::vector<std::vector<DenseSlice>> CandidateLayouts(const std::vector<DenseTensor>& tensors,
                                                      const std::vector<AlphaBeta>& networks,
                                                      const Tuning& tuning = kTuning);

}  // namespace poseidon
