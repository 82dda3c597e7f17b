#include "core/plan/dense_layout.h"

#include <limits>

#include "tests/check.h"

namespace poseidon {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

std::vector<DenseTensor> Tensors(const std::vector<double>& bytes, const std::vector<double>& ready = {}) {
  std::vector<DenseTensor> tensors;
  for (size_t i = 0; i < bytes.size(); ++i) {
    tensors.push_back({static_cast<int>(i), bytes[i], ready.empty() ? static_cast<double>(i) : ready[i], 0});
  }
  return tensors;
}

std::vector<std::vector<int>> Members(const std::vector<DenseSlice>& slices) {
  std::vector<std::vector<int>> members;
  for (const DenseSlice& slice : slices) members.push_back(slice.tensors);
  return members;
}

using Lists = std::vector<std::vector<int>>;

TEST(LazySlicesHoldThetaBytesAndLargeTensorsTravelAlone) {
  POSEIDON_CHECK_EQ(Members(LayOutLazily(Tensors({4, 4, 4, 50, 4, 3}), 10)), (Lists{{0, 1, 2}, {3}, {4, 5}}));
  POSEIDON_CHECK_EQ(Members(LayOutLazily(Tensors({4, 50, 4, 4}), 10)), (Lists{{1}, {0, 2, 3}}));
  POSEIDON_CHECK_EQ(Members(LayOutLazily(Tensors({1, 2, 3}), 0)), (Lists{{0}, {1}, {2}}));
  POSEIDON_CHECK_EQ(Members(LayOutLazily(Tensors({1, 2, 3}), kInfinite)), (Lists{{0, 1, 2}}));
  POSEIDON_CHECK(LayOutLazily({}, 10).empty());
  POSEIDON_CHECK_EQ(Members(LayOutLazily(Tensors({4, 50, 4, 7, 4}), 100, 7)), (Lists{{1}, {3}, {0, 2, 4}}));
}

TEST(NoMoreSlicesThanBytesOverThetaPlusOne) {
  const std::vector<double> bytes = {7, 1, 1, 13, 2, 9, 4, 4, 30, 1, 5, 5, 5, 8, 2};
  double sum = 0;
  for (double each : bytes) sum += each;
  for (double theta : {1.0, 3.0, 8.0, 20.0, 100.0}) {
    POSEIDON_CHECK(static_cast<double>(LayOutLazily(Tensors(bytes), theta).size()) <= sum / theta + 1);
  }
}

TEST(NoMessageOfMoreThanAGibibyteFromSeveralTensors) {
  const double gib = 1 << 30;
  for (const auto& slices : {LayOutLazily(Tensors({gib / 2, gib / 2, gib / 4, 2 * gib, 1}), kInfinite),
                             LayOutMerged(Tensors({gib / 2, gib / 2, gib / 4, 2 * gib, 1}), {100, 0})}) {
    POSEIDON_CHECK_EQ(Members(slices), (Lists{{0, 1}, {2}, {3}, {4}}));
  }
}

TEST(DtypesDoNotMix) {
  std::vector<DenseTensor> tensors = Tensors({1, 1, 1, 1});
  tensors[1].kind = tensors[3].kind = 1;
  POSEIDON_CHECK_EQ(Members(LayOutLazily(tensors, kInfinite)), (Lists{{0, 2}, {1, 3}}));
  POSEIDON_CHECK_EQ(Members(LayOutMerged(tensors, {100, 1})), (Lists{{0, 2}, {1, 3}}));
}

// arXiv 1811.11141, algorithm 1, by hand: alpha 2, one second per byte.
TEST(MergedWaitsForWhatComesWithinAlpha) {
  // 0 starts at 0; 1 comes at 1 < 0 + 2: merged, 2 bytes from 1 to 5. 2 comes at 8: alone, 8 to 11. 3 comes at 9 but
  // the channel is taken until 11, so 4 at 12 comes within alpha of that.
  POSEIDON_CHECK_EQ(Members(LayOutMerged(Tensors({1, 1, 1, 1, 1}, {0, 1, 8, 10, 12}), {2, 1})),
                    (Lists{{0, 1}, {2}, {3, 4}}));
  POSEIDON_CHECK_EQ(Members(LayOutMerged(Tensors({1, 1, 1}, {0, 5, 10}), {0, 1})), (Lists{{0}, {1}, {2}}));
  POSEIDON_CHECK_EQ(Members(LayOutMerged(Tensors({1, 1, 1}, {0, 5, 10}), {1e3, 1})), (Lists{{0, 1, 2}}));
}

TEST(PrioritySendsFrontLayersFirstAndLetsThemOvertake) {
  // Tensor 0 (last layer) is ready first and large; 2 (first layer) comes while it travels.
  const auto slices = LayOutByPriority(Tensors({30, 5, 5}, {0, 11, 12}), 10, {0, 1});
  POSEIDON_CHECK_EQ(Members(slices), (Lists{{0}, {0}, {2}, {1}, {0}}));
  POSEIDON_CHECK_EQ(slices[0].part, 0);
  POSEIDON_CHECK_EQ(slices[1].part, 1);
  POSEIDON_CHECK_EQ(slices[4].part, 2);
  POSEIDON_CHECK(slices[0].parts == 3 && slices[2].parts == 1);
}

TEST(EveryMethodSendsEveryByteOnce) {
  const std::vector<DenseTensor> tensors = Tensors({3, 17, 1, 1, 40, 2, 2, 8});
  for (const char* text : {"bsp", "wfbp", "merged", "priority:10", "lazy:10", "auto"}) {
    DenseSettings settings;
    POSEIDON_REQUIRE_OK(ParseDense(text, &settings));
    std::vector<double> share(tensors.size());
    for (const DenseSlice& slice : LayOut(settings, tensors, {1, 0.1})) {
      for (int index : slice.tensors) share[index] += 1.0 / slice.parts;
    }
    for (double each : share) POSEIDON_CHECK_NEAR(each, 1, 1e-12);
  }
  DenseSettings horovod;
  horovod.method = DenseMethod::kFused;
  POSEIDON_CHECK(LayOut(horovod, tensors, {1, 0.1}).empty());
}

TEST(Parsing) {
  DenseSettings settings;
  for (const char* text : {"auto", "horovod", "bsp", "wfbp", "merged", "priority", "lazy"}) {
    POSEIDON_REQUIRE_OK(ParseDense(text, &settings));
    POSEIDON_CHECK_EQ(std::string(Name(settings.method)), std::string(text));
    POSEIDON_CHECK_EQ(settings.theta, 4 << 20);
  }
  POSEIDON_REQUIRE_OK(ParseDense("lazy:1e6", &settings));
  POSEIDON_CHECK_EQ(settings.theta, 1000000);
  for (const char* text : {"", "fast", "Lazy", "lazy:", "lazy:0", "lazy:-5", "lazy:nan", "lazy:10x", "bsp:10"}) {
    POSEIDON_CHECK_EQ(ParseDense(text, &settings).code(), StatusCode::kInvalidArgument);
  }
  POSEIDON_CHECK_EQ(settings.theta, 1000000);  // untouched
  POSEIDON_CHECK_CONTAINS(ParseDense("fast", &settings).message(), "auto, horovod, bsp, wfbp, merged, priority, lazy");
}

TEST(AnyNumberGivesALayoutOfAllTensors) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> odd = {0, -1, 1e-300, 7, 1e30, 1e308, kInfinite, -kInfinite, kNaN};
  for (double a : odd) {
    for (double b : odd) {
      std::vector<DenseTensor> tensors = Tensors({a, 5, b}, {b, a, kNaN});
      for (const auto& slices : {LayOutLazily(tensors, a), LayOutLazily(tensors, a, b), LayOutMerged(tensors, {a, b}),
                                 LayOutByPriority(tensors, a, {b, a}), LayOutByPriority(tensors, 10, {a, b})}) {
        std::vector<int> sent(tensors.size()), parts(tensors.size());
        for (const DenseSlice& slice : slices) {
          for (int index : slice.tensors) {
            POSEIDON_CHECK_EQ(slice.part, sent[index]++);
            parts[index] = slice.parts;
          }
        }
        for (size_t i = 0; i < tensors.size(); ++i) POSEIDON_CHECK(sent[i] >= 1 && sent[i] == parts[i]);
        POSEIDON_CHECK(slices.size() <= kMostParts + tensors.size());
      }
    }
  }
}

TEST(ATinyThetaDoesNotMakeAMessagePerByte) {
  const auto slices = LayOutByPriority(Tensors({4e9, 4, 1e6}), 1, {1e-3, 1e-9});
  POSEIDON_CHECK(slices.size() > 2000 && slices.size() <= kMostParts + 3);
  // Small ones are cut into elements at most: those of float64 have 8 bytes.
  POSEIDON_CHECK_EQ(LayOutByPriority(Tensors({80}), 1, {1e-3, 1e-9}).size(), size_t{10});
  // A theta that is large enough counts as it is.
  POSEIDON_CHECK_EQ(LayOutByPriority(Tensors({1e6}), 1e3, {1e-3, 1e-9}).size(), size_t{1000});
}

}  // namespace
}  // namespace poseidon
