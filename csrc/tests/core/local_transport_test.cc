#include "tests/local_transport.h"

#include <cmath>
#include <cstdint>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/check.h"

using namespace poseidon;

namespace {

const ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

// Enqueues on every member of a process set and waits; the statuses, by member.
std::vector<Status> Allreduce(LocalCluster& cluster, const std::vector<Buffer>& buffers, Reduction reduction,
                              const std::vector<int>& members, int process_set = 0, const std::string& name = "t") {
  std::vector<std::future<Status>> futures;
  for (size_t i = 0; i < members.size(); ++i) {
    auto promise = std::make_shared<std::promise<Status>>();
    futures.push_back(promise->get_future());
    const auto done = [promise](const Status& s) { promise->set_value(s); };
    const Status status = cluster.transport(members[i])->Allreduce(name, buffers[i], reduction, process_set, done);
    if (!status.ok()) promise->set_value(status);
  }
  std::vector<Status> statuses;
  for (auto& future : futures) statuses.push_back(future.get());
  return statuses;
}

template <typename T>
void CheckOps(DType dtype) {
  LocalCluster cluster(3);
  const double expected[] = {4, 12, 2, 6, 48};  // of 2, 4, 6
  for (int i = 0; i < 5; ++i) {
    std::vector<std::vector<T>> values{{2, 2}, {4, 4}, {6, 6}};
    std::vector<Buffer> buffers;
    for (auto& of_rank : values) buffers.push_back({of_rank.data(), {2}, dtype});
    for (const Status& s : Allreduce(cluster, buffers, {kOps[i], 1.0, 1.0}, {0, 1, 2})) POSEIDON_CHECK(s.ok());
    for (const auto& of_rank : values) {
      POSEIDON_CHECK_EQ(static_cast<double>(of_rank[0]), expected[i]);
      POSEIDON_CHECK_EQ(static_cast<double>(of_rank[1]), expected[i]);
    }
  }
}

std::vector<uint16_t> Halves(std::initializer_list<float> values) {
  std::vector<uint16_t> halves;
  for (float value : values) halves.push_back(HalfFromFloat(value));
  return halves;
}

}  // namespace

TEST(HalvesComeBackAndRoundToEven) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = FloatFromHalf(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      POSEIDON_CHECK(std::isnan(FloatFromHalf(HalfFromFloat(value))));
    } else {
      POSEIDON_CHECK_EQ(HalfFromFloat(value), static_cast<uint16_t>(bits));
    }
  }
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {  // halfway to the next one
    const float next = bits == 0x7bff ? 65536.0f : FloatFromHalf(static_cast<uint16_t>(bits + 1));
    const float middle = (FloatFromHalf(static_cast<uint16_t>(bits)) + next) / 2;
    POSEIDON_CHECK_EQ(HalfFromFloat(middle), static_cast<uint16_t>(bits + (bits & 1)));
    POSEIDON_CHECK_EQ(HalfFromFloat(std::nextafter(middle, 0.0f)), static_cast<uint16_t>(bits));
    POSEIDON_CHECK_EQ(HalfFromFloat(std::nextafter(middle, 1e6f)), static_cast<uint16_t>(bits + 1));
  }
  POSEIDON_CHECK_EQ(FloatFromHalf(0x3c00), 1.0f);
  POSEIDON_CHECK_EQ(FloatFromHalf(0xc000), -2.0f);
  POSEIDON_CHECK_EQ(HalfFromFloat(std::numeric_limits<float>::infinity()), uint16_t{0x7c00});
}

TEST(EveryOperationOnEveryType) {
  CheckOps<uint8_t>(DType::kUInt8);
  CheckOps<int8_t>(DType::kInt8);
  CheckOps<int16_t>(DType::kInt16);
  CheckOps<int32_t>(DType::kInt32);
  CheckOps<int64_t>(DType::kInt64);
  CheckOps<float>(DType::kFloat32);
  CheckOps<double>(DType::kFloat64);
}

TEST(HalvesAreSummedInFloatAndRoundedOnce) {
  LocalCluster cluster(3);
  std::vector<std::vector<uint16_t>> values{Halves({2048, 2}), Halves({1, 4}), Halves({1, 6})};
  std::vector<Buffer> buffers;
  for (auto& of_rank : values) buffers.push_back({of_rank.data(), {2}, DType::kFloat16});
  Allreduce(cluster, buffers, {ReduceOp::kSum, 0.5, 2.0}, {0, 1, 2});
  for (const auto& of_rank : values) POSEIDON_CHECK_EQ(of_rank, Halves({2050, 12}));  // 2048 + 1 is 2048 in float16
}

TEST(BfloatIsGatheredAndNotReduced) {
  LocalCluster cluster(1);
  uint16_t value = 0x3f80;
  const Buffer buffer{&value, {1}, DType::kBFloat16};
  const Status refused = Allreduce(cluster, {buffer}, {}, {0})[0];
  POSEIDON_CHECK(refused.code() == StatusCode::kInvalidArgument);
  POSEIDON_CHECK_EQ(refused.message(), std::string("t: Horovod cannot send bfloat16."));
  uint16_t gathered = 0;
  std::promise<Status> done;
  const auto allocate = [&](const std::vector<int64_t>& shape) { return Buffer{&gathered, shape, DType::kBFloat16}; };
  const auto end = [&](const Status& s) { done.set_value(s); };
  POSEIDON_CHECK(cluster.transport(0)->Allgather("g", buffer, allocate, 0, end).ok());
  POSEIDON_CHECK(done.get_future().get().ok());
  POSEIDON_CHECK_EQ(gathered, value);
}

TEST(ProcessSetsHaveTheirOwnNamesAndAverage) {
  LocalCluster cluster(3);
  const int set = cluster.AddProcessSet({0, 2});
  float values[] = {1, 10, 3};
  const auto buffer = [&](int rank) { return Buffer{&values[rank], {1}, DType::kFloat32}; };
  float other[3] = {};
  for (int rank : {0, 2}) {  // the same name among all, which rank 1 does not send
    const Buffer of_all{&other[rank], {1}, DType::kFloat32};
    POSEIDON_CHECK(cluster.transport(rank)->Allreduce("t", of_all, {}, 0, [](const Status&) {}).ok());
  }
  for (const Status& status : Allreduce(cluster, {buffer(0), buffer(2)}, {}, {0, 2}, set)) POSEIDON_CHECK(status.ok());
  POSEIDON_CHECK_EQ(values[0], 2.0f);
  POSEIDON_CHECK_EQ(values[1], 10.0f);
  POSEIDON_CHECK_EQ(values[2], 2.0f);
  const auto waiting = cluster.waiting();
  POSEIDON_CHECK_EQ(waiting.size(), size_t{1});
  POSEIDON_CHECK_EQ(waiting[0].missing, std::vector<int>{1});
  POSEIDON_CHECK_EQ(waiting[0].names, std::vector<std::string>{"t"});
  POSEIDON_CHECK(!Allreduce(cluster, {buffer(1)}, {}, {1}, set)[0].ok());
  POSEIDON_CHECK(!Allreduce(cluster, {buffer(1)}, {}, {1}, 7)[0].ok());
}

TEST(AFailureOfOneRankLeavesTheOthers) {
  LocalCluster cluster(2);
  float values[] = {1, 3};
  const std::vector<Buffer> buffers{{&values[0], {1}, DType::kFloat32}, {&values[1], {1}, DType::kFloat32}};
  cluster.FailNext("", Status::Unavailable("no route"), 1);
  const auto statuses = Allreduce(cluster, buffers, {ReduceOp::kSum, 1.0, 1.0}, {0, 1});
  POSEIDON_CHECK(statuses[0].ok());
  POSEIDON_CHECK_EQ(statuses[1].message(), std::string("no route"));
  POSEIDON_CHECK_EQ(values[0], 4.0f);
  cluster.FailNext("t", Status::Unavailable("no route"));
  for (const Status& s : Allreduce(cluster, buffers, {ReduceOp::kSum, 1.0, 1.0}, {0, 1})) POSEIDON_CHECK(!s.ok());
  POSEIDON_CHECK_EQ(values[0], 4.0f);
  POSEIDON_CHECK(Allreduce(cluster, buffers, {ReduceOp::kSum, 1.0, 1.0}, {0, 1})[1].ok());
  POSEIDON_CHECK_EQ(values[1], 8.0f);
  const auto log = cluster.log();
  POSEIDON_CHECK_EQ(log.size(), size_t{3});
  POSEIDON_CHECK(!log[0].ok && !log[1].ok && log[2].ok);
  POSEIDON_CHECK_EQ(log[2].bytes, (std::vector<int64_t>{4, 4}));
}
