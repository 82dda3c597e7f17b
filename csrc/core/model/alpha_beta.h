// The two-parameter cost of a collective: seconds = alpha + beta * bytes, and its fit from timed trials (the model of
// the performance papers, e.g. arXiv 1711.05979 and MG-WFBP). Pure functions, any thread.
#pragma once

#include <vector>

namespace poseidon {

struct AlphaBeta {
  double alpha = 0;  // seconds of one collective, whatever its size
  double beta = 0;   // seconds per byte; which bytes is said where the model is used

  double Seconds(double bytes) const { return alpha + beta * bytes; }
  bool known() const { return alpha > 0 || beta > 0; }
};

// One collective as all ranks saw it.
struct Trial {
  double bytes = 0;
  std::vector<double> seconds_by_rank;  // from this rank's enqueue to its completion
};

struct AlphaBetaFit {
  AlphaBeta model;
  double skew_seconds = 0;  // median over trials of how much longer the first rank waited than the last one
  bool clamped = false;     // alpha or beta came out negative or beyond bounds (bounds.h) and was moved in
};

// The rank that enqueued last waited for nobody, so the smallest duration is the transfer's and the rest of the largest
// is skew: a late rank does not pass as a slow network. Per size the lower quartile of its trials counts; the line is
// fitted to relative errors (weights 1/seconds^2), since sizes span orders of magnitude. Trials without ranks are
// ignored.
AlphaBetaFit FitAlphaBeta(const std::vector<Trial>& trials);

}  // namespace poseidon
