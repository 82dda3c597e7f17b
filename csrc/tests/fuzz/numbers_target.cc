// Any numbers at all in the models that rank 0 chooses by.
#include <cmath>

#include "core/base/bounds.h"
#include "core/plan/dense_layout.h"
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
  TimeChoiceSettings settings{choices.Double(), choices.Double()};
  std::vector<Scheme> schemes, alternative;
  std::vector<bool> forced;
  std::vector<DenseTensor> dense;
  for (size_t i = 0; i < count; ++i) {
    StepTensor tensor;
    for (double* number : {&tensor.ready, &tensor.allreduce_bytes, &tensor.gather_bytes, &tensor.cost.local,
                           &tensor.cost.input, &tensor.cost.pack, &tensor.cost.rebuild}) {
      *number = choices.Double();
    }
    tensor.carrier = static_cast<int>(choices.Below(count + 1)) - 1;
    tensor.slice = static_cast<int>(choices.Below(3)) - 1;
    const size_t kind = choices.Below(16), choice = choices.Below(16);
    tensor.copied = (kind & 1) != 0;
    tensor.allreduce_kind = static_cast<uint8_t>(kind >> 1 & 1);
    tensor.gather_kind = static_cast<uint8_t>(kind >> 2);
    schemes.push_back((choice & 1) != 0 ? Scheme::kSfb : Scheme::kAllreduce);
    alternative.push_back((choice & 2) != 0 ? Scheme::kSfb : Scheme::kAllreduce);
    forced.push_back((choice & 12) == 12);
    model.sliced = model.sliced || choice == 15;
    model.tensors.push_back(tensor);
    dense.push_back({static_cast<int>(i), tensor.allreduce_bytes, tensor.ready, tensor.allreduce_kind});
  }
  FUZZ_REQUIRE(IsEstimate(SimulateStep(model, schemes)));
  const NetworkLoad load = LoadOf(model, schemes, observed, {});
  FUZZ_REQUIRE(IsWithin(load.allreduce, kLeastLoad, kMostLoad) && IsWithin(load.allgather, kLeastLoad, kMostLoad));
  const TriedChoice tried{schemes, observed, settings.margin, 3};
  const TimeChoice choice =
      ChooseByTime(UnderLoad(model, load), alternative, forced, settings, schemes, {tried}, observed);
  FUZZ_REQUIRE(choice.schemes.size() == count && choice.dense_schemes.size() == count &&
               choice.over_memory.size() == count);
  FUZZ_REQUIRE(IsEstimate(choice.chosen) && IsEstimate(choice.dense));
  for (size_t i = 0; i < count; ++i) {
    FUZZ_REQUIRE(choice.schemes[i] == Scheme::kAllreduce ? !forced[i] || alternative[i] == Scheme::kAllreduce
                                                         : choice.schemes[i] == alternative[i]);
  }
  CheckLayout(LayOutLazily(dense, observed, settings.margin), dense);
  CheckLayout(LayOutMerged(dense, model.allreduce), dense);
  CheckLayout(LayOutByPriority(dense, observed, model.allreduce), dense);
  std::vector<Trial> trials;
  for (const StepTensor& tensor : model.tensors) {
    trials.push_back({tensor.allreduce_bytes, {tensor.ready, tensor.cost.local}});
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
