#include "core/engine/gather_bytes.h"

#include "tests/check.h"
#include "tests/local_transport.h"

namespace poseidon {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes Pattern(int rank, size_t length) {
  Bytes bytes(length);
  for (size_t i = 0; i < length; ++i) bytes[i] = static_cast<uint8_t>(rank * 91 + i * 7);
  return bytes;
}

void CheckGathers(const std::vector<std::vector<size_t>>& lengths_by_call) {
  const int size = static_cast<int>(lengths_by_call[0].size());
  LocalWorld world(size);
  RunRanks(size, [&](int rank) {
    for (const auto& lengths : lengths_by_call) {
      std::vector<Bytes> by_rank{{1, 2, 3}};  // what is there goes away
      POSEIDON_REQUIRE_OK(
          GatherBytes(*world.engines[rank], "control", 0, size, Pattern(rank, lengths[rank]), &by_rank));
      POSEIDON_CHECK_EQ(by_rank.size(), lengths.size());
      for (size_t r = 0; r < by_rank.size(); ++r) {
        POSEIDON_CHECK_EQ(by_rank[r], Pattern(static_cast<int>(r), lengths[r]));
      }
    }
  });
}

TEST(DifferentLengthsInRankOrder) { CheckGathers({{5, 5, 5}, {1, 300, 17}, {70000, 1, 256}}); }

TEST(EmptyOnSomeRanksOrAll) { CheckGathers({{0, 4, 0}, {3, 0, 0}, {0, 0, 9}, {0, 0, 0}, {2, 2, 2}}); }

TEST(OneRank) { CheckGathers({{6}, {0}}); }

TEST(NamesInAnotherOrderOnEachRank) {
  LocalWorld world(2);
  RunRanks(2, [&](int rank) {
    RunRanks(3, [&, rank](int caller) {  // concurrent calls of one rank
      const int call = rank == 0 ? caller : 2 - caller;
      std::vector<Bytes> by_rank;
      POSEIDON_REQUIRE_OK(GatherBytes(*world.engines[rank], "control" + std::to_string(call), 0, 2,
                                      Pattern(10 * call + rank, 5 + call), &by_rank));
      POSEIDON_CHECK(by_rank == std::vector<Bytes>{Pattern(10 * call, 5 + call), Pattern(10 * call + 1, 5 + call)});
    });
  });
}

TEST(FailuresReachTheCaller) {
  LocalWorld world(2);
  world.cluster.FailNext("control", Status::Unavailable("a peer died"));
  RunRanks(2, [&](int rank) {
    std::vector<Bytes> by_rank;
    POSEIDON_CHECK_EQ(GatherBytes(*world.engines[rank], "control", 0, 2, Pattern(rank, 3), &by_rank).message(),
                      std::string("control: a peer died"));
    POSEIDON_CHECK_OK(GatherBytes(*world.engines[rank], "control", 0, 2, Pattern(rank, 3), &by_rank));
    POSEIDON_CHECK_EQ(GatherBytes(*world.engines[rank], "control", 1, 2, {}, &by_rank).code(),
                      StatusCode::kInvalidArgument);
    world.engines[rank]->Stop();
    POSEIDON_CHECK_EQ(GatherBytes(*world.engines[rank], "control", 0, 2, {}, &by_rank).code(), StatusCode::kAborted);
  });
}

TEST(DamagedBlocks) {
  // What rank 1 sends in place of a block: a length that exceeds what follows, and one that is cut.
  for (Bytes damaged :
       {Bytes{5, 0, 0, 0, 0, 0, 0, 0, 42}, Bytes{255, 255, 255, 255, 255, 255, 255, 255}, Bytes{1, 0, 0}}) {
    LocalWorld world(2);
    Bytes gathered;
    RunRanks(2, [&](int rank) {
      if (rank == 1) {
        POSEIDON_REQUIRE_OK(world.cluster.transport(1)->Allgather(
            "control", {damaged.data(), {static_cast<int64_t>(damaged.size())}, DType::kUInt8},
            [&](const std::vector<int64_t>& shape) {
              gathered.resize(shape[0]);
              return Buffer{gathered.data(), shape, DType::kUInt8};
            },
            0, [](const Status&) {}));
        return;
      }
      std::vector<Bytes> by_rank;
      const Status status = GatherBytes(*world.engines[0], "control", 0, 2, Pattern(0, 3), &by_rank);
      POSEIDON_CHECK_EQ(status.code(), StatusCode::kInternal);
      POSEIDON_CHECK_CONTAINS(status.message(), "control");
    });
    world.cluster.Shutdown();  // before `gathered` goes
  }
}

TEST(OneBlockOfEachRank) {
  const auto joined = [](const std::vector<Bytes>& blocks) {
    Bytes all;
    for (const Bytes& block : blocks) {
      const Bytes framed = FrameBlock(block);
      all.insert(all.end(), framed.begin(), framed.end());
    }
    return all;
  };
  std::vector<Bytes> by_rank;
  POSEIDON_REQUIRE_OK(SplitBlocks(joined({{1}, {}, {2, 3}}), 3, "x", &by_rank));
  POSEIDON_CHECK(by_rank == std::vector<Bytes>{{1}, {}, {2, 3}});
  // A rank counted as two, or none: what is read by rank would be another rank's, or nobody's.
  POSEIDON_CHECK_CONTAINS(SplitBlocks(joined({{1}, {}, {2, 3}}), 2, "x", &by_rank).message(),
                          "x is damaged: 10 bytes follow the blocks of all 2");
  POSEIDON_CHECK_CONTAINS(SplitBlocks(joined({{1}, {}}), 3, "x", &by_rank).message(), "rank 2 of 3 is missing");
  POSEIDON_CHECK_CONTAINS(SplitBlocks({}, 1, "x", &by_rank).message(), "rank 0 of 1 is missing");
  POSEIDON_CHECK_CONTAINS(SplitBlocks({9, 0, 0, 0, 0, 0, 0, 0}, 1, "x", &by_rank).message(), "rank 0 of 1 is cut");
  POSEIDON_CHECK_EQ(SplitBlocks(joined({{}}), 2, "x", &by_rank).code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace poseidon
