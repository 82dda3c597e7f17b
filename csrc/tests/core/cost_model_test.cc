#include "core/model/cost_model.h"

#include "core/model/work.h"
#include "tests/check.h"

namespace poseidon {
namespace {

struct Layer {
  const char* name;
  int64_t m, n;
  double break_even;                    // global rows, rounded
  int max_size_at_32, max_size_at_128;  // largest P for which P times K rows still favour SFB
};

TEST(BreakEvenRowsOfKnownLayers) {
  const std::vector<Layer> layers = {
      {"VGG fc6", 4096, 25088, 7042, 220, 55},      {"VGG fc7", 4096, 4096, 4096, 128, 32},
      {"VGG fc8", 1000, 4096, 1608, 50, 12},        {"VGG fc8-22K", 21841, 4096, 6898, 215, 53},
      {"AlexNet fc6", 4096, 9216, 5671, 177, 44},   {"ResNet fc", 1000, 2048, 1344, 41, 10},
      {"GoogLeNet fc", 1000, 1024, 1012, 31, 7},    {"BERT-base FFN", 3072, 768, 1229, 38, 9},
      {"BERT-large FFN", 4096, 1024, 1638, 51, 12},
  };
  for (const Layer& layer : layers) {
    const double rows = SfbBreakEvenRows(layer.m, layer.n, 4, 4);
    POSEIDON_CHECK_NEAR(rows, layer.break_even, 0.5);
    POSEIDON_CHECK_EQ(static_cast<int>(rows / 32), layer.max_size_at_32);
    POSEIDON_CHECK_EQ(static_cast<int>(rows / 128), layer.max_size_at_128);
    // The byte formulas cross exactly there, for any number of ranks.
    const int64_t below = static_cast<int64_t>(rows);
    for (int size : {2, 3, 7, 64}) {
      const double dense = AllreduceWireBytes(layer.m * layer.n, DType::kFloat32, size);
      POSEIDON_CHECK(SfbWireBytes(layer.m, layer.n, below, DType::kFloat32, size) <= dense);
      POSEIDON_CHECK(SfbWireBytes(layer.m, layer.n, below + 1, DType::kFloat32, size) > dense);
    }
  }
}

// Poseidon (arXiv 1706.03292), 4096 x 4096, K = 32, 8 workers and 8 servers; floats sent + received per node. The ring
// does what a node that is both worker and server does: same floats for the matrix, same for the factors.
TEST(PaperExample) {
  const double mn = 4096.0 * 4096, k = 32, workers = 8, servers = 8;
  const double ps_worker = 2 * mn;
  const double ps_both = 2 * mn * (workers + servers - 2) / servers;
  const double sfb = 2 * k * (workers - 1) * (4096 + 4096);
  POSEIDON_CHECK_NEAR(ps_worker, 33.6e6, 0.05e6);
  POSEIDON_CHECK_NEAR(ps_both, 58.7e6, 0.05e6);
  POSEIDON_CHECK_NEAR(sfb, 3.7e6, 0.05e6);
  const double floats_per_sent_byte = 2.0 / 4;  // sent + received, 4 bytes each
  POSEIDON_CHECK_EQ(AllreduceWireBytes(4096 * 4096, DType::kFloat32, 8) * floats_per_sent_byte, ps_both);
  POSEIDON_CHECK_EQ(SfbWireBytes(4096, 4096, 32 * 8, DType::kFloat32, 8) * floats_per_sent_byte, sfb);
}

TEST(BreakEvenWithDifferentElementSizes) {
  POSEIDON_CHECK_EQ(SfbBreakEvenRows(4096, 4096, 2, 4), 8192.0);  // half factors, fp32 gradient
  POSEIDON_CHECK_EQ(SfbBreakEvenRows(4096, 4096, 4, 2), 2048.0);
  POSEIDON_CHECK_EQ(SfbBreakEvenRows(4096, 4096, 2, 2), 4096.0);
  POSEIDON_CHECK_EQ(SfbBreakEvenRows(0, 0, 4, 4), 0.0);
}

TEST(OneRankSendsNothing) {
  POSEIDON_CHECK_EQ(AllreduceWireBytes(100, DType::kFloat32, 1), 0.0);
  POSEIDON_CHECK_EQ(AllgatherWireBytes(100, 1), 0.0);
  POSEIDON_CHECK_EQ(SfbWireBytes(10, 10, 5, DType::kFloat32, 1), 0.0);
}

TEST(Formulas) {
  POSEIDON_CHECK_EQ(AllreduceWireBytes(100, DType::kFloat32, 4), 600.0);
  POSEIDON_CHECK_EQ(AllreduceWireBytes(100, DType::kFloat16, 4), 300.0);
  POSEIDON_CHECK_EQ(AllgatherWireBytes(400, 4), 300.0);
  POSEIDON_CHECK_EQ(SfbWireBytes(10, 20, 4, DType::kFloat32, 4), 360.0);
  // Beyond int64 the sizes are still finite numbers.
  const int64_t large = int64_t{1} << 40;
  POSEIDON_CHECK_EQ(SfbWireBytes(large, large, large, DType::kFloat64, 2), 0x1p83);
}

struct Table {
  const char* name;
  int64_t rows, dim;
  int64_t ids_per_rank, unique_per_rank;
  int size;
  double allreduce_megabytes, rows_megabytes;  // sent by one rank per step, 1e6 bytes
};

// Bytes decide: a transformer's vocabulary on many ranks (horovod #3328: gathering ran out of memory), a large table
// touched by few ids (horovod #2799), and ids of which 90 % repeat others.
TEST(EmbeddingTables) {
  const std::vector<Table> tables = {
      {"transformer", 32000, 512, 7000, 7000, 64, 129.024, 906.696},
      {"recommender", 30000000, 8, 4000, 4000, 8, 1680.0, 1.12},
      {"repeated ids", 100000, 64, 50000, 5000, 8, 44.8, 9.24},
  };
  for (const Table& table : tables) {
    const double dense = AllreduceWireBytes(table.rows * table.dim, DType::kFloat32, table.size);
    const double rows = RowSparseWireBytes(table.size * table.unique_per_rank, table.dim, DType::kFloat32, table.size);
    POSEIDON_CHECK_NEAR(dense / 1e6, table.allreduce_megabytes, 0.01);
    POSEIDON_CHECK_NEAR(rows / 1e6, table.rows_megabytes, 0.01);
    // The crossover: 2 V D global rows of D + 2 elements, within 1 %.
    const double crossover = 2.0 * static_cast<double>(table.rows * table.dim) / static_cast<double>(table.dim + 2);
    POSEIDON_CHECK(RowSparseWireBytes(static_cast<int64_t>(0.99 * crossover), table.dim, DType::kFloat32, table.size) <
                   dense);
    POSEIDON_CHECK(RowSparseWireBytes(static_cast<int64_t>(1.01 * crossover), table.dim, DType::kFloat32, table.size) >
                   dense);
  }
  // Unmerged, the third table would send more than twice the dense gradient.
  POSEIDON_CHECK(RowSparseWireBytes(8 * 50000, 64, DType::kFloat32, 8) >
                 2 * AllreduceWireBytes(6400000, DType::kFloat32, 8));
}

TEST(RowSparseRowsAsTheyAreSent) {
  POSEIDON_CHECK_EQ(RowSparseWireBytes(8, 6, DType::kFloat32, 2), 8 * (1 + 6 + 1) * 4 / 2.0);
  POSEIDON_CHECK_EQ(RowSparseWireBytes(8, 6, DType::kFloat64, 2), 8 * (1 + 6 + 1) * 8 / 2.0);
  POSEIDON_CHECK_EQ(RowSparseWireBytes(8, 6, DType::kFloat16, 2), 8 * (2 + 6 + 1) * 2 / 2.0);
  POSEIDON_CHECK_EQ(RowSparseWireBytes(8, 6, DType::kBFloat16, 2), 8 * (2 + 6 + 1) * 2 / 2.0);
  POSEIDON_CHECK_EQ(RowSparseWireBytes(8, 6, DType::kFloat32, 1), 0.0);
  POSEIDON_CHECK_EQ(SparseAllgatherWireBytes(8, 6, DType::kFloat32, 2), 8 * (8 + 6 * 4) / 2.0);
}

// In P-1 steps a rank passes on every block but its right neighbour's own; the formula is the mean over ranks.
TEST(RingBytesOfUnequalBlocksAverageToTheFormula) {
  const std::vector<int64_t> blocks = {100, 0, 37, 1000, 5};
  int64_t sum = 0;
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    for (size_t block = 0; block < blocks.size(); ++block)
      sum += block == (rank + 1) % blocks.size() ? 0 : blocks[block];
  }
  POSEIDON_CHECK_NEAR(static_cast<double>(sum) / 5, AllgatherWireBytes(1142, 5), 1e-9);
}

TEST(WhatARankSendsOfAWork) {
  Work work;
  work.bytes = 1000;
  POSEIDON_CHECK_EQ(SentBytes(work, 4), 1500.0);
  work.collective = Collective::kAllgather;
  POSEIDON_CHECK_EQ(SentBytes(work, 4), 750.0);
  POSEIDON_CHECK_EQ(SentBytes(work, 1), 0.0);
}

}  // namespace
}  // namespace poseidon
