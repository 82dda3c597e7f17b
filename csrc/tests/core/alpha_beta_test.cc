#include "core/model/alpha_beta.h"

#include <limits>

#include "core/base/bounds.h"
#include "tests/check.h"

namespace poseidon {
namespace {

constexpr double kAlpha = 5e-4, kBeta = 8e-9;

std::vector<Trial> Trials(int ranks, double straggler_delay) {
  std::vector<Trial> trials;
  for (double bytes : {4096.0, 65536.0, 1048576.0}) {
    const double transfer = kAlpha + kBeta * bytes;
    Trial trial{bytes, std::vector<double>(ranks, transfer + straggler_delay)};
    trial.seconds_by_rank[1] = transfer;  // the rank that came last waited for nobody
    trials.push_back(trial);
  }
  return trials;
}

TEST(LineIsRecovered) {
  const AlphaBetaFit fit = FitAlphaBeta(Trials(4, 0));
  POSEIDON_CHECK_NEAR(fit.model.alpha, kAlpha, kAlpha * 1e-6);
  POSEIDON_CHECK_NEAR(fit.model.beta, kBeta, kBeta * 1e-6);
  POSEIDON_CHECK_NEAR(fit.skew_seconds, 0, 1e-12);
  POSEIDON_CHECK(!fit.clamped);
  POSEIDON_CHECK_NEAR(fit.model.Seconds(1e6), kAlpha + kBeta * 1e6, 1e-9);
}

// cases.md 58: a late rank is skew, not bandwidth.
TEST(StragglerIsSkew) {
  const AlphaBetaFit fit = FitAlphaBeta(Trials(4, 0.2));
  POSEIDON_CHECK_NEAR(fit.model.alpha, kAlpha, kAlpha * 0.05);
  POSEIDON_CHECK_NEAR(fit.model.beta, kBeta, kBeta * 0.05);
  POSEIDON_CHECK_NEAR(fit.skew_seconds, 0.2, 1e-9);
}

TEST(OneDisturbedTrialOfASizeDoesNotCount) {
  std::vector<Trial> trials;
  for (int i = 0; i < 3; ++i) {
    for (const Trial& trial : Trials(2, 0)) trials.push_back(trial);
  }
  for (double& seconds : trials[5].seconds_by_rank) seconds *= 50;
  const AlphaBetaFit fit = FitAlphaBeta(trials);
  POSEIDON_CHECK_NEAR(fit.model.beta, kBeta, kBeta * 1e-6);
}

TEST(NegativeValuesAreClampedAndSaid) {
  // Superlinear: the line through it meets the axis below zero.
  AlphaBetaFit fit = FitAlphaBeta({{1e3, {1e-6}}, {1e6, {1e-1}}});
  POSEIDON_CHECK(fit.clamped);
  POSEIDON_CHECK_EQ(fit.model.alpha, 0.0);
  POSEIDON_CHECK(fit.model.beta > 0);
  // Faster the larger: only noise does that.
  fit = FitAlphaBeta({{1e3, {2e-3}}, {1e6, {1e-3}}});
  POSEIDON_CHECK(fit.clamped);
  POSEIDON_CHECK_EQ(fit.model.beta, 0.0);
  POSEIDON_CHECK(fit.model.alpha >= 1e-3 && fit.model.alpha <= 2e-3);
}

TEST(LittleToFit) {
  POSEIDON_CHECK(!FitAlphaBeta({}).model.known());
  POSEIDON_CHECK(!FitAlphaBeta({{1, {}}}).model.known());
  const AlphaBetaFit one = FitAlphaBeta({{4096, {1e-3, 2e-3}}});
  POSEIDON_CHECK_NEAR(one.model.alpha, 1e-3, 1e-12);
  POSEIDON_CHECK_EQ(one.model.beta, 0.0);
}

TEST(AnyNumberGivesANetworkWithinBounds) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> odd = {0, -1, 1e-300, 1, 1e9, 1e308, kInfinity, -kInfinity, kNaN};
  for (double a : odd) {
    for (double b : odd) {
      for (double bytes : odd) {
        const AlphaBetaFit fit = FitAlphaBeta({{4096, {a, b}}, {bytes, {b, a}}, {bytes, {a}}});
        POSEIDON_CHECK(fit.model.alpha >= 0 && fit.model.alpha <= kMostAlpha && fit.model.beta >= 0 &&
                       fit.model.beta <= kMostBeta);
        POSEIDON_CHECK(fit.skew_seconds >= 0 && fit.skew_seconds <= kMostSeconds);
        POSEIDON_CHECK(fit.model.known());
      }
    }
  }
  const AlphaBetaFit slow = FitAlphaBeta({{4096, {1e8}}});
  POSEIDON_CHECK(slow.clamped && slow.model.alpha == kMostAlpha);
}

}  // namespace
}  // namespace poseidon
