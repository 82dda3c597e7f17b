#include "core/plan/time_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/check.h"

namespace poseidon {
namespace {

constexpr Scheme kA = Scheme::kAllreduce, kS = Scheme::kSfb;

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
  StepTensor tensor;
  tensor.ready = ready;
  tensor.allreduce_bytes = 4 * m * n;
  tensor.gather_bytes = 4 * (m + n) * rows * ranks;
  tensor.cost.local = tensor.cost.input = 2 * m * n * rows / rate;
  tensor.cost.rebuild = tensor.cost.local * ranks;
  tensor.cost.pack = 4 * (m + n) * rows / 5e9;
  model->tensors.push_back(tensor);
  model->compute = std::max(model->compute, ready);
}

TimeChoice Choose(const StepModel& model, const TimeChoiceSettings& settings = {}) {
  const size_t n = model.tensors.size();
  return ChooseByTime(model, std::vector<Scheme>(n, kS), std::vector<bool>(n, false), settings);
}

// cases.md 59.
TEST(SlowNetworkAndLargeLayersChooseFactors) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 1000, 4096, 32, 8, 5e12, 0.1);
  AddLayer(&model, 4096, 4096, 32, 8, 5e12, 0.11);
  AddLayer(&model, 4096, 25088, 32, 8, 5e12, 0.12);
  model.compute = 0.5;
  const TimeChoice choice = Choose(model);
  POSEIDON_CHECK_EQ(choice.schemes, std::vector<Scheme>{kS, kS, kS});
  POSEIDON_CHECK(choice.chosen.step < 0.6 && choice.dense.step > 5);
}

TEST(FastNetworkAndSmallLayersStayPlain) {
  StepModel model = Network(100, 2e-4);
  for (int i = 0; i < 50; ++i) AddLayer(&model, 256, 256 * (1 + i % 9), 64, 8, 5e12, 0.002 * i);
  model.compute = 0.11;
  const TimeChoice choice = Choose(model);
  POSEIDON_CHECK_EQ(choice.schemes, std::vector<Scheme>(50, kA));
  POSEIDON_CHECK_EQ(choice.chosen.step, choice.dense.step);
}

TEST(SlowProcessorChoosesAllreduceAlthoughFactorsAreFewerBytes) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 2048, 2048, 64, 8, 5e12, 0.1);
  POSEIDON_CHECK_EQ(Choose(model).schemes, std::vector<Scheme>{kS});
  model = Network(1, 2e-4);
  AddLayer(&model, 2048, 2048, 64, 8, 1e9, 10);  // the product of all ranks' rows takes 4 s more
  POSEIDON_CHECK_EQ(Choose(model).schemes, std::vector<Scheme>{kA});
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
      std::vector<Scheme> schemes;
      for (unsigned i = 0; i < 7; ++i) schemes.push_back((bits >> i) & 1 ? kS : kA);
      best = std::min(best, SimulateStep(model, schemes).step);
    }
    const TimeChoice choice = Choose(model);
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
  TimeChoiceSettings settings;
  settings.gather_memory_bytes = model.tensors[0].gather_bytes;
  TimeChoice choice = Choose(model, settings);
  POSEIDON_CHECK_EQ(choice.schemes, std::vector<Scheme>{kS, kA});
  POSEIDON_CHECK_EQ(choice.over_memory, std::vector<bool>{false, true});
  settings.gather_memory_bytes = 0;
  choice = Choose(model, settings);
  POSEIDON_CHECK_EQ(choice.schemes, std::vector<Scheme>{kA, kA});
}

TEST(ForcedAndImpossible) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 64, 64, 512, 8, 1e9, 0.1);  // never worth it
  AddLayer(&model, 4096, 4096, 32, 8, 5e12, 0.1);
  const TimeChoice choice = ChooseByTime(model, {kS, kA}, {true, false}, {});
  POSEIDON_CHECK_EQ(choice.schemes, std::vector<Scheme>{kS, kA});
}

TEST(ChoiceInForceStaysUnlessTheGainIsReal) {
  StepModel model = Network(1, 2e-4);
  AddLayer(&model, 4096, 4096, 32, 8, 5e12, 0.1);
  AddLayer(&model, 8, 8, 1, 8, 5e12, 0.1);
  const std::vector<Scheme> alternative = {kS, kS};
  const std::vector<bool> forced = {false, false};
  const TimeChoice fresh = ChooseByTime(model, alternative, forced, {});
  std::vector<Scheme> nearly = fresh.schemes;
  nearly[1] = nearly[1] == kA ? kS : kA;  // moves next to nothing
  TimeChoiceSettings settings;
  settings.margin = 0.05;
  POSEIDON_CHECK_EQ(ChooseByTime(model, alternative, forced, settings, nearly).schemes, nearly);
  POSEIDON_CHECK_EQ(ChooseByTime(model, alternative, forced, settings, {kA, kA}).schemes, fresh.schemes);
  POSEIDON_CHECK_EQ(ChooseByTime(model, alternative, forced, settings, {kA}).schemes,
                    fresh.schemes);  // of another model
}

// One layer whose factors seem a little better, or a little worse, than its gradient.
StepModel OneLayer(double gather_bytes) {
  StepModel model;
  model.allreduce = model.allgather = {0, 1};
  model.compute = 1;
  model.tensors.resize(1);
  model.tensors[0].ready = 1;
  model.tensors[0].allreduce_bytes = 10;
  model.tensors[0].gather_bytes = gather_bytes;
  return model;
}

std::vector<Scheme> ChooseTried(const StepModel& model, const std::vector<Scheme>& current,
                                const std::vector<TriedChoice>& tried) {
  return ChooseByTime(model, {kS}, {false}, {}, current, tried).schemes;
}

TEST(AFasterChoiceIsTriedAndLeftWhenItIsNot) {
  const StepModel model = OneLayer(8);
  const std::vector<Scheme> dense = {kA}, factors = {kS};
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 15}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 15}}), dense);    // not again
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 16}, {factors, 15}}), factors);  // unless that has become slower
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 9}}), factors);
}

TEST(FactorsThatDisappointGiveWayToAllreduce) {
  const StepModel model = OneLayer(8);
  POSEIDON_CHECK_EQ(ChooseTried(model, {kS}, {{{kS}, 12}}), std::vector<Scheme>{kA});    // 11 expected
  POSEIDON_CHECK_EQ(ChooseTried(model, {kS}, {{{kS}, 11.1}}), std::vector<Scheme>{kS});  // too small a gain to try
}

TEST(AFirstStepThatWasFasterSpeaksForAllreduce) {
  StepModel model = OneLayer(8);
  model.allreduce.beta = 4;  // mistaken: 41
  POSEIDON_CHECK_EQ(ChooseByTime(model, {kS}, {false}, {}, {kS}, {{{kS}, 12}}, 11).schemes, std::vector<Scheme>{kA});
  POSEIDON_CHECK_EQ(ChooseByTime(model, {kS}, {false}, {}, {kS}, {{{kS}, 12}}, 13).schemes, std::vector<Scheme>{kS});
  POSEIDON_CHECK_EQ(ChooseByTime(model, {kS}, {false}, {}, {kS}, {{{kS}, 12}, {{kA}, 14}}, 11).schemes,
                    std::vector<Scheme>{kS});
}

TEST(AShortLookIsTakenAgain) {
  const StepModel model = OneLayer(8);
  const std::vector<Scheme> dense = {kA}, factors = {kS};
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 12, 0.1}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 12, 0.4}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 20, 0.1}}), dense);  // far off
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 12, 9, 1}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}, {factors, 12, 36, 3}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 12, 0.1}}), dense);  // the faster one first
}

TEST(ShortStepsAreTriedWithoutMuchAdo) {
  StepModel model = OneLayer(14);  // factors are predicted to take 15 against 11
  const std::vector<Scheme> dense = {kA}, factors = {kS};
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}}), dense);
  model.compute = model.tensors[0].ready = 0.001;
  model.allreduce.beta = model.allgather.beta = 0.001;
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 0.011}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 0.011}, {factors, 0.015}}), dense);
  model.tensors[0].gather_bytes = 18;  // far off
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 0.011}}), dense);
  model.tensors[0].gather_bytes = 8;
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{factors, 0.009}}), dense);
}

TEST(WhereTheModelExplainsLittleTheFewestBytesGetATurn) {
  StepModel model = OneLayer(8);
  model.allreduce.beta = 0.1;  // mistaken: 2
  const std::vector<Scheme> dense = {kA}, factors = {kS};
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}}), factors);
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 3}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 15}}), dense);
  POSEIDON_CHECK_EQ(ChooseTried(model, factors, {{dense, 11}, {factors, 9}}), factors);
  model.tensors[0].gather_bytes = 21;  // more than a ring sends of the gradient
  POSEIDON_CHECK_EQ(ChooseTried(model, dense, {{dense, 11}}), dense);
}

TEST(WhatWasTriedUnderAnotherLimitDoesNotCount) {
  TimeChoiceSettings settings;
  settings.gather_memory_bytes = 4;
  const auto choice = ChooseByTime(OneLayer(8), {kS}, {false}, settings, {kA}, {{{kS}, 1}, {{kA}, 11}});
  POSEIDON_CHECK_EQ(choice.schemes, std::vector<Scheme>{kA});
}

TEST(AnyNumberLeadsToAChoice) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
  for (double odd : {kNaN, kInfinity, -kInfinity, 1e308, 1e300, -1.0}) {
    StepModel model = Network(1, 2e-4);
    for (int i = 0; i < 3; ++i) AddLayer(&model, 1000, 1000, 32, 8, 5e12, 0.1 * (i + 1));
    const auto sound = [&](const StepModel& given, const TimeChoiceSettings& settings, double seconds) {
      const TriedChoice tried{{kA, kA, kS}, seconds, seconds, 5};
      const TimeChoice choice =
          ChooseByTime(given, {kS, kS, kS}, {false, false, true}, settings, {kA, kA, kS}, {tried}, seconds);
      POSEIDON_CHECK(choice.schemes.size() == 3 && choice.over_memory.size() == 3 && choice.schemes[2] == kS);
      POSEIDON_CHECK(std::isfinite(choice.chosen.step) && std::isfinite(choice.dense.step));
    };
    sound(model, {}, odd);
    sound(model, {odd, 2e9}, 1);
    sound(model, {0.02, odd}, 1);
    StepModel huge = model;
    huge.allreduce = huge.allgather = {odd, odd};
    sound(huge, {}, 1);
    huge = model;
    huge.tensors[0].ready = huge.tensors[1].gather_bytes = odd;
    huge.tensors[1].cost = {odd, odd, odd, odd};
    sound(huge, {odd, odd}, odd);
  }
}

}  // namespace
}  // namespace poseidon
