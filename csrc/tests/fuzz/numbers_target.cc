// Any numbers at all in the models that rank 0 chooses by.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/bounds.h"
#include "core/plan/dense_layout.h"
#include "core/plan/network_load.h"
#include "core/plan/time_choice.h"
#include "tests/fuzz/fuzz.h"

namespace poseidon {
namespace fuzz {
namespace {

constexpr size_t kMostTensors = 20;

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds = {{}};
  for (size_t tensors : {size_t{1}, size_t{5}}) {
    Bytes seed(1, static_cast<uint8_t>(tensors));
    const auto add = [&](double number) {
      seed.resize(seed.size() + sizeof(number));
      std::memcpy(seed.data() + seed.size() - sizeof(number), &number, sizeof(number));
    };
    for (double number : {1e-3, 1e-9, 1e-3, 1e-9, 0.1, 0.5, 1e8, 1e-10, 0.3, 0.02, 2e9}) add(number);
    for (size_t i = 0; i < tensors; ++i) {
      for (double number : {0.01 * static_cast<double>(i), 4e6, 1e5, 1e-3, 1e-3, 1e-4, 4e-3}) add(number);
      for (size_t choice : {i, i + 1, size_t{1}, size_t{0}}) seed.push_back(static_cast<uint8_t>(choice));
    }
    seeds.push_back(seed);
  }
  return seeds;
}

void CheckLayout(const std::vector<DenseSlice>& slices, const std::vector<DenseTensor>& tensors) {
  std::vector<int> sent(tensors.size()), parts(tensors.size());
  for (const DenseSlice& slice : slices) {
    for (int index : slice.tensors) {
      FUZZ_REQUIRE(slice.part == sent.at(index)++);
      parts[index] = slice.parts;
    }
  }
  FUZZ_REQUIRE(sent == parts && slices.size() <= kMostParts + tensors.size());
  for (int count : sent) FUZZ_REQUIRE(count > 0);
}

bool IsEstimate(const StepEstimate& estimate) {
  return std::isfinite(estimate.step) && std::isfinite(estimate.channel) && std::isfinite(estimate.rebuild) &&
         estimate.step >= estimate.compute;
}

bool Run(const Bytes& input) {
  Choices choices(input);
  StepModel model;
  const size_t count = choices.Below(kMostTensors + 1);
  for (double* number : {&model.allreduce.alpha, &model.allreduce.beta, &model.allgather.alpha, &model.allgather.beta,
                         &model.compute, &model.contention, &model.fusion_bytes, &model.copy}) {
    *number = choices.Double();
  }
  const double observed = choices.Double();
  Tuning tuning;
  tuning.margin = choices.Double();
  const double memory_bytes = choices.Double();
  Choice choice;
  Allowed allowed;
  std::vector<DenseTensor> dense;
  for (size_t i = 0; i < count; ++i) {
    StepTensor tensor;
    tensor.ready = choices.Double();
    tensor.offers.resize(1 + i % 3);
    for (Work& work : tensor.offers) work.bytes = work.memory_bytes = choices.Double();
    Work& last = tensor.offers.back();
    for (double* number : {&tensor.local, &last.lead, &last.before, &last.after, &last.own}) *number = choices.Double();
    last.covers = {static_cast<int>(choices.Below(count + 2)) - 1};
    tensor.slice = static_cast<int>(choices.Below(3)) - 1;
    const size_t kind = choices.Below(16), bits = choices.Below(16);
    tensor.copied = (kind & 1) != 0;
    last.kind = static_cast<uint8_t>(kind >> 2);
    last.collective = (kind & 2) != 0 ? Collective::kAllgather : Collective::kAllreduce;
    choice.push_back(static_cast<int>(bits % tensor.offers.size()));
    allowed.push_back({static_cast<int>(tensor.offers.size()) - 1});
    for (int offer = 0; offer + 1 < static_cast<int>(tensor.offers.size()) && (bits & 8) == 0; ++offer) {
      allowed.back().insert(allowed.back().begin(), offer);
    }
    model.sliced = model.sliced || bits == 15;
    dense.push_back({static_cast<int>(i), tensor.offers[0].bytes, tensor.ready, tensor.offers[0].kind});
    model.tensors.push_back(std::move(tensor));
  }
  FUZZ_REQUIRE(IsEstimate(SimulateStep(model, choice)));
  const NetworkLoad load = LoadOf(model, choice, observed, {});
  FUZZ_REQUIRE(IsWithin(load.allreduce, kLeastLoad, kMostLoad) && IsWithin(load.allgather, kLeastLoad, kMostLoad));
  const Past past{choice, {{choice, observed, tuning.margin, 3}}, observed};
  const TimeChoice chosen = ChooseByTime(UnderLoad(model, load), allowed, memory_bytes, past, tuning);
  FUZZ_REQUIRE(chosen.choice.size() == count && chosen.plain.size() == count && chosen.over_memory.size() == count);
  FUZZ_REQUIRE(IsEstimate(SimulateStep(model, chosen.choice)));
  for (size_t i = 0; i < count; ++i) {
    FUZZ_REQUIRE(std::count(allowed[i].begin(), allowed[i].end(), chosen.choice[i]) == 1);
  }
  CheckLayout(LayOutLazily(dense, observed, tuning.margin), dense);
  CheckLayout(LayOutMerged(dense, model.allreduce), dense);
  CheckLayout(LayOutByPriority(dense, observed, model.allreduce), dense);
  std::vector<Trial> trials;
  for (const StepTensor& tensor : model.tensors) {
    trials.push_back({tensor.offers[0].bytes, {tensor.ready, tensor.local}});
  }
  const AlphaBeta fit = FitAlphaBeta(trials).model;
  FUZZ_REQUIRE(IsWithin(fit.alpha, 0, kMostAlpha) && IsWithin(fit.beta, 0, kMostBeta));
  return true;
}

}  // namespace

const Target kNumbersTarget = {
    "numbers",
    "any model has finite estimates, a choice among the alternatives, and layouts that send each gradient once", Seeds,
    Run};

}  // namespace fuzz
}  // namespace poseidon
