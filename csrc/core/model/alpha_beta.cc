#include "core/model/alpha_beta.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/bounds.h"
#include "core/base/median.h"

namespace poseidon {
namespace {

using SecondsBySize = std::map<double, std::vector<double>>;

double LowerQuartile(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[(values.size() - 1) / 4];
}

AlphaBetaFit FitLine(const SecondsBySize& by_size) {
  AlphaBetaFit fit;
  double s1 = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (const auto& [bytes, seconds] : by_size) {
    // Disturbances only delay. And a network that is taken for better than it is gets tried and found out; one taken
    // for worse does not.
    const double y = LowerQuartile(seconds);
    const double weight = 1 / (y * y);
    s1 += weight;
    sx += weight * bytes;
    sy += weight * y;
    sxx += weight * bytes * bytes;
    sxy += weight * bytes * y;
  }
  const double determinant = s1 * sxx - sx * sx;
  // A single size, or none but 0 bytes, says nothing of the slope.
  if (by_size.size() == 1 || determinant <= 0) {
    fit.model.alpha = sy / s1;
    return fit;
  }
  fit.model.alpha = (sxx * sy - sx * sxy) / determinant;
  fit.model.beta = (s1 * sxy - sx * sy) / determinant;
  if (fit.model.alpha < 0) {
    fit.clamped = true;
    fit.model = {0, sxy / sxx};
  } else if (fit.model.beta < 0) {
    fit.clamped = true;
    fit.model = {sy / s1, 0};
  }
  return fit;
}

}  // namespace

AlphaBetaFit FitAlphaBeta(const std::vector<Trial>& trials) {
  SecondsBySize by_size;
  std::vector<double> skews;
  for (const Trial& trial : trials) {
    if (trial.seconds_by_rank.empty()) continue;
    double least = kMostSeconds, most = 0;
    for (double seconds : trial.seconds_by_rank) {
      least = std::min(least, Bounded(seconds, 0, kMostSeconds));
      most = std::max(most, Bounded(seconds, 0, kMostSeconds));
    }
    by_size[Bounded(trial.bytes, 0, kMostBytes)].push_back(std::max(least, 1e-9));
    skews.push_back(most - least);
  }
  if (by_size.empty()) return {};
  AlphaBetaFit fit = FitLine(by_size);
  const AlphaBeta bounded = {Bounded(fit.model.alpha, 0, kMostAlpha), Bounded(fit.model.beta, 0, kMostBeta)};
  fit.clamped = fit.clamped || bounded.alpha != fit.model.alpha || bounded.beta != fit.model.beta;
  fit.model = bounded;
  fit.skew_seconds = Median(std::move(skews));
  return fit;
}

}  // namespace poseidon
