#include "core/plan/time_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/check.h"
#include "tests/core/two_offers.h"

namespace poseidon {
namespace {

constexpr int kA = 0, kS = 1;

// A network of `gbit` Gb/s over which 8 ranks allreduce and gather: ring factors 2 * 7/8 and 7/8.
StepModel Network(double gbit, double alpha) {
  StepModel model;
  const double seconds_per_byte = 8e-9 / gbit;
  model.allreduce = {2 * alpha, 2 * 7.0 / 8 * seconds_per_byte};
  model.allgather = {alpha, 7.0 / 8 * seconds_per_byte};
  return model;
}

// rate: floating point operations per second.
void AddLayer(StepModel* model, double m, double n, double rows, int ranks, double rate, double ready) {
  LayerCost cost;
  cost.local = cost.input = 2 * m * n * rows / rate;
  cost.rebuild = cost.local * ranks;
  cost.pack = 4 * (m + n) * rows / 5e9;
  model->tensors.push_back(TwoOffers(ready, 4 * m * n, 4 * (m + n) * rows * ranks, cost));
  model->compute = std::max(model->compute, ready);
}

struct Limits {
  double margin = 0.02;
  double memory_bytes = 2e9;
};

struct Chosen : TimeChoice {
  StepEstimate chosen, dense;
};

// alternative[i]: what tensor i may take instead of its first offer; forced[i]: it has no choice and takes that.
Chosen ByTime(const StepModel& model, const Choice& alternative, const std::vector<bool>& forced,
              const Limits& limits = {}, const Choice& current = {}, const std::vector<TriedChoice>& tried = {},
              double plain_at_most = std::numeric_limits<double>::infinity()) {
  Allowed allowed;
  for (size_t i = 0; i < alternative.size(); ++i) {
    if (forced[i]) {
      allowed.push_back({alternative[i]});
    } else {
      allowed.push_back(alternative[i] == kA ? std::vector<int>{kA} : std::vector<int>{kA, alternative[i]});
    }
  }
  Tuning tuning;
  tuning.margin = limits.margin;
  Chosen chosen;
  static_cast<TimeChoice&>(chosen) =
      ChooseByTime(model, allowed, limits.memory_bytes, {current, tried, plain_at_most}, tuning);
  chosen.chosen = SimulateStep(model, chosen.choice);
  chosen.dense = SimulateStep(model, chosen.plain);
  return chosen;
}

Chosen Choose(const StepModel& model, const Limits& limits = {}) {
  const size_t n = model.tensors.size();
  return ByTime(model, Choice(n, kS), std::vector<bool>(n, false), limits);
}

// cases.md 59.
TEST(SlowNetworkAndLargeLayersChooseFactors) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 1000, 4096, 32, 8, 5e12, 0.1);
  AddLayer(&model, 4096, 4096, 32, 8, 5e12, 0.11);
  AddLayer(&model, 4096, 25088, 32, 8, 5e12, 0.12);
  model.compute = 0.5;
  const Chosen choice = Choose(model);
  POSEIDON_CHECK_EQ(choice.choice, Choice{kS, kS, kS});
  POSEIDON_CHECK(choice.chosen.step < 0.6 && choice.dense.step > 5);
}

TEST(FastNetworkAndSmallLayersStayPlain) {
  StepModel model = Network(100, 2e-4);
  for (int i = 0; i < 50; ++i) AddLayer(&model, 256, 256 * (1 + i % 9), 64, 8, 5e12, 0.002 * i);
  model.compute = 0.11;
  const Chosen choice = Choose(model);
  POSEIDON_CHECK_EQ(choice.choice, Choice(50, kA));
  POSEIDON_CHECK_EQ(choice.chosen.step, choice.dense.step);
}

TEST(SlowProcessorChoosesAllreduceAlthoughFactorsAreFewerBytes) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 2048, 2048, 64, 8, 5e12, 0.1);
  POSEIDON_CHECK_EQ(Choose(model).choice, Choice{kS});
  model = Network(1, 2e-4);
  AddLayer(&model, 2048, 2048, 64, 8, 1e9, 10);  // the product of all ranks' rows takes 4 s more
  POSEIDON_CHECK_EQ(Choose(model).choice, Choice{kA});
}

// Within 5% of the best of all 2^n choices in 96 of 100 small random steps, and never far off.
TEST(SearchComesCloseToTheBestOfAllChoices) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> unit(0, 1);
  int missed = 0;
  for (int trial = 0; trial < 200; ++trial) {
    StepModel model = Network(0.2 + 2 * unit(random), 1e-3 * unit(random));
    model.contention = unit(random);
    double ready = 0;
    for (int i = 0; i < 7; ++i) {
      ready += 0.02 * unit(random);
      AddLayer(&model, 64 + 2000 * unit(random), 64 + 2000 * unit(random), 1 + 100 * unit(random), 8, 2e10, ready);
    }
    double best = 1e9;
    for (unsigned bits = 0; bits < 128; ++bits) {
      Choice schemes;
      for (unsigned i = 0; i < 7; ++i) schemes.push_back((bits >> i) & 1 ? kS : kA);
      best = std::min(best, SimulateStep(model, schemes).step);
    }
    const Chosen choice = Choose(model);
    POSEIDON_CHECK(choice.chosen.step <= choice.dense.step + 1e-12);
    POSEIDON_CHECK(choice.chosen.step <= 1.2 * best);
    if (choice.chosen.step > 1.05 * best) ++missed;
  }
  POSEIDON_CHECK(missed <= 8);
}

TEST(MemoryLimitKeepsWhatGainsMostPerByte) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 4096, 25088, 32, 8, 5e12, 0.1);
  AddLayer(&model, 1000, 4096, 32, 8, 5e12, 0.1);
  Limits settings;
  settings.memory_bytes = model.tensors[0].offers[1].memory_bytes;
  Chosen choice = Choose(model, settings);
  POSEIDON_CHECK_EQ(choice.choice, Choice{kS, kA});
  POSEIDON_CHECK_EQ(choice.over_memory, std::vector<bool>{false, true});
  settings.memory_bytes = 0;
  choice = Choose(model, settings);
  POSEIDON_CHECK_EQ(choice.choice, Choice{kA, kA});
}

// Three offers for every layer: whole, as factors, and as a third of the bytes for some work before and after.
TEST(TheBestOfSeveralOffers) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 4096, 4096, 8, 8, 5e12, 0.1);     // few rows: factors
  AddLayer(&model, 1024, 1024, 4096, 8, 5e12, 0.3);  // many: a third of the bytes
  AddLayer(&model, 64, 64, 4096, 8, 5e12, 0.3);      // small: whole
  Allowed allowed;
  for (StepTensor& tensor : model.tensors) {
    Work third = tensor.offers[0];
    third.bytes /= 3;
    third.before = third.after = 2e-3;
    tensor.offers.push_back(third);
    allowed.push_back({0, 1, 2});
  }
  POSEIDON_CHECK_EQ(ChooseByTime(model, allowed, 2e9).choice, Choice{1, 2, 0});
  // Among all 27 none is better.
  double best = 1e9;
  for (int i = 0; i < 27; ++i) best = std::min(best, SimulateStep(model, {i % 3, i / 3 % 3, i / 9}).step);
  POSEIDON_CHECK(SimulateStep(model, {1, 2, 0}).step < best + 1e-9 + 0.02 * best);
  // Where the factors of the first do not fit, its next best does.
  const TimeChoice limited = ChooseByTime(model, allowed, 1e5);
  POSEIDON_CHECK_EQ(limited.choice, Choice{2, 2, 0});
  allowed[1] = {1};
  POSEIDON_CHECK_EQ(ChooseByTime(model, allowed, 2e9).choice[1], 1);
}

TEST(ForcedAndImpossible) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 64, 64, 512, 8, 1e9, 0.1);  // never worth it
  AddLayer(&model, 4096, 4096, 32, 8, 5e12, 0.1);
  const Chosen choice = ByTime(model, {kS, kA}, {true, false}, {});
  POSEIDON_CHECK_EQ(choice.choice, Choice{kS, kA});
}

TEST(ChoiceInForceStaysUnlessTheGainIsReal) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 4096, 4096, 32, 8, 5e12, 0.1);
  AddLayer(&model, 8, 8, 1, 8, 5e12, 0.1);
  const Choice alternative = {kS, kS};
  const std::vector<bool> forced = {false, false};
  const Chosen fresh = ByTime(model, alternative, forced, {});
  Choice nearly = fresh.choice;
  nearly[1] = nearly[1] == kA ? kS : kA;  // moves next to nothing
  Limits settings;
  settings.margin = 0.05;
  POSEIDON_CHECK_EQ(ByTime(model, alternative, forced, settings, nearly).choice, nearly);
  POSEIDON_CHECK_EQ(ByTime(model, alternative, forced, settings, {kA, kA}).choice, fresh.choice);
  POSEIDON_CHECK_EQ(ByTime(model, alternative, forced, settings, {kA}).choice,
                    fresh.choice);  // of another model
}

// One layer whose factors seem a little better, or a little worse, than its gradient.
StepModel OneLayer(double gather_bytes) {
  StepModel model;
  model.allreduce = model.allgather = {0, 1};
  model.compute = 1;
  model.tensors = {TwoOffers(1, 10, gather_bytes)};
  return model;
}

Choice ChooseTried(const StepModel& model, const Choice& current, const std::vector<TriedChoice>& tried) {
  return ByTime(model, {kS}, {false}, {}, current, tried).choice;
}

TEST(AFasterChoiceIsTriedAndLeftWhenItIsNot) {
  const StepModel model = OneLayer(8);
  const Choice dense = {kA}, factors = {kS};
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 15}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 15}}), dense);    // not again
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 16}, {factors, 15}}), factors);  // unless that has become slower
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 9}}), factors);
}

TEST(FactorsThatDisappointGiveWayToAllreduce) {
  const StepModel model = OneLayer(8);
  POSEIDON_CHECK_EQ(ChooseTried(model, {kS}, {{{kS}, 12}}), Choice{kA});    // 11 expected
  POSEIDON_CHECK_EQ(ChooseTried(model, {kS}, {{{kS}, 11.1}}), Choice{kS});  // too small a gain to try
}

TEST(AFirstStepThatWasFasterSpeaksForAllreduce) {
  StepModel model = OneLayer(8);
  model.allreduce.beta = 4;  // mistaken: 41
  POSEIDON_CHECK_EQ(ByTime(model, {kS}, {false}, {}, {kS}, {{{kS}, 12}}, 11).choice, Choice{kA});
  POSEIDON_CHECK_EQ(ByTime(model, {kS}, {false}, {}, {kS}, {{{kS}, 12}}, 13).choice, Choice{kS});
  POSEIDON_CHECK_EQ(ByTime(model, {kS}, {false}, {}, {kS}, {{{kS}, 12}, {{kA}, 14}}, 11).choice, Choice{kS});
}

TEST(AShortLookIsTakenAgain) {
  const StepModel model = OneLayer(8);
  const Choice dense = {kA}, factors = {kS};
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 12, 0.1}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 12, 0.4}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 20, 0.1}}), dense);  // far off
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 12, 9, 1}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 12, 36, 3}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 12, 0.1}}), dense);  // the faster one first
}

TEST(ShortStepsAreTriedWithoutMuchAdo) {
  StepModel model = OneLayer(14);  // factors are predicted to take 15 against 11
  const Choice dense = {kA}, factors = {kS};
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}}), dense);
  model.compute = model.tensors[0].ready = 0.001;
  model.allreduce.beta = model.allgather.beta = 0.001;
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 0.011}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 0.011}, {factors, 0.015}}), dense);
  SetGatherBytes(&model.tensors[0], 18);  // far off
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 0.011}}), dense);
  SetGatherBytes(&model.tensors[0], 8);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{factors, 0.009}}), dense);
}

TEST(WhereTheModelExplainsLittleTheFewestBytesGetATurn) {
  StepModel model = OneLayer(8);
  model.allreduce.beta = 0.1;  // mistaken: 2
  const Choice dense = {kA}, factors = {kS};
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 3}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 15}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 9}}), factors);
  SetGatherBytes(&model.tensors[0], 21);  // more than a ring sends of the gradient
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}}), dense);
}

TEST(WhatWasTriedUnderAnotherLimitDoesNotCount) {
  Limits settings;
  settings.memory_bytes = 4;
  const auto choice = ByTime(OneLayer(8), {kS}, {false}, settings, {kA}, {{{kS}, 1}, {{kA}, 11}});
  POSEIDON_CHECK_EQ(choice.choice, Choice{kA});
}

TEST(AnyNumberLeadsToAChoice) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
  for (double odd : {kNaN, kInfinity, -kInfinity, 1e308, 1e300, -1.0}) {
    StepModel model = Network(1, 2e-4);
    for (int i = 0; i < 3; ++i) AddLayer(&model, 1000, 1000, 32, 8, 5e12, 0.1 * (i + 1));
    const auto sound = [&](const StepModel& given, const Limits& settings, double seconds) {
      const TriedChoice tried{{kA, kA, kS}, seconds, seconds, 5};
      const Chosen choice = ByTime(given, {kS, kS, kS}, {false, false, true}, settings, {kA, kA, kS}, {tried}, seconds);
      POSEIDON_CHECK(choice.choice.size() == 3 && choice.over_memory.size() == 3 && choice.choice[2] == kS);
      POSEIDON_CHECK(std::isfinite(choice.chosen.step) && std::isfinite(choice.dense.step));
    };
    sound(model, {}, odd);
    sound(model, {odd, 2e9}, 1);
    sound(model, {0.02, odd}, 1);
    StepModel huge = model;
    huge.allreduce = huge.allgather = {odd, odd};
    sound(huge, {}, 1);
    huge = model;
    huge.tensors[0].ready = odd;
    huge.tensors[1] = TwoOffers(0.2, 1000, odd, {odd, odd, odd, odd});
    sound(huge, {odd, odd}, odd);
  }
}

}  // namespace
}  // namespace poseidon
