#include "core/alpha_beta.h"

#include <algorithm>
#include <map>

#include "core/median.h"

namespace poseidon {
namespace {

double LowerQuartile(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[(values.size() - 1) / 4];
}

}  // namespace

AlphaBetaFit FitAlphaBeta(const std::vector<Trial>& trials) {
  AlphaBetaFit fit;
  std::map<double, std::vector<double>> by_size;
  std::vector<double> skews;
  for (const Trial& trial : trials) {
    if (trial.seconds_by_rank.empty()) continue;
    const auto [least, most] = std::minmax_element(trial.seconds_by_rank.begin(), trial.seconds_by_rank.end());
    by_size[trial.bytes].push_back(std::max(*least, 1e-9));
    skews.push_back(*most - *least);
  }
  if (by_size.empty()) return fit;
  fit.skew_seconds = Median(std::move(skews));

  double s1 = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (const auto& [bytes, seconds] : by_size) {
    // Disturbances only delay. And a network that is taken for better than it is gets tried and found out; one taken for worse does not.
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

}  // namespace poseidon
