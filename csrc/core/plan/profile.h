// What the profiling step (step 0) saw of every gradient on one rank, its encoding for the allgather, and the merge of
// all ranks' profiles, from which rank 0 of the process set selects. Pure functions, any thread.
#ifndef POSEIDON_CORE_PROFILE_H_
#define POSEIDON_CORE_PROFILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/status.h"

namespace poseidon {

struct TensorProfile {
  std::string name;
  std::vector<int64_t> shape;            // of the parameter; [M out features, N in features] for a linear weight
  DType dtype = DType::kFloat32;         // of the gradient
  bool is_linear_weight = false;         // candidate for SFB: used as the weight of at least one linear call
  std::string bias;                      // parameter that its calls used as bias; empty if none
  DType factor_dtype = DType::kFloat32;  // of x and d; under autocast not the gradient's
  int64_t rows = 0;                      // K: rows this rank fed, over all calls and passes of the step
  int64_t calls = 0;
  bool active = true;        // wants a gradient
  bool used = false;         // got a gradient in this step
  bool complete = false;     // of all passes of the step, in backward
  bool sparse = false;       // that gradient was sparse
  bool sfb_allowed = false;  // the guard's verdict on this rank, for SFB or row-sparse
  std::string reason;        // why not; empty if allowed
  double ready_seconds =
      -1;  // when its gradient was complete, from the step's beginning, as if everything were dense; -1: none
  bool is_embedding =
      false;  // candidate for row-sparse: used as the table of at least one embedding call; rows are its ids
  int64_t unique_rows = 0;  // of an embedding: rows that this rank would send, equal ids merged
  int64_t order = -1;       // its place among the gradients in the order in which backward completed them; -1: none
};

struct RankProfile {
  uint64_t settings_hash = 0;  // of settings_text, or of more than it shows
  std::string settings_text;   // one "key=value" per line; quoted in the error when ranks differ
  double compute_seconds = 0;  // from the step's beginning to synchronize(), as if everything were dense
  double step_seconds = 0;     // to the end of synchronize(), under the plan in force; 0: not known
  double first_step_seconds =
      0;  // of step 0, in which everything is dense, without what was measured in it; 0: not known
  std::vector<TensorProfile> tensors;
};

struct MergedTensor {
  // Of the first rank that used the tensor (rank 0 if none did), with that rank's own rows, calls and verdict; but
  // is_linear_weight and is_embedding are the OR over the ranks that used it.
  TensorProfile base;
  std::vector<int64_t> rows_by_rank;  // index: rank in the process set
  int64_t global_rows = 0;            // sum over ranks; K*P of the cost model
  int64_t max_rank_rows = 0;
  bool sfb_allowed = false;        // no rank that used the tensor objects, and at least one used it
  std::string reason;              // the first objection, "rank 1: ..."; empty if allowed
  bool sparse = false;             // on any rank
  double ready_seconds = -1;       // of the slowest rank: no collective starts before it
  int64_t global_unique_rows = 0;  // sum over ranks
  bool everywhere = false;         // complete in backward, on every rank
};

struct MergedProfile {
  std::vector<MergedTensor> tensors;  // in the order of every rank's RankProfile::tensors
  double compute_seconds = 0;         // of the slowest rank
  double step_seconds = 0;            // of the slowest rank
  double first_step_seconds = 0;      // of the slowest rank
};

// Used as an embedding table, and as nothing else.
inline bool IsTable(const MergedTensor& tensor) { return tensor.base.is_embedding && !tensor.base.is_linear_weight; }

// Elements of a tensor of this shape; INT64_MAX if that does not fit.
int64_t NumElements(const std::vector<int64_t>& shape);
// "[4096, 25088]"
std::string ShapeText(const std::vector<int64_t>& shape);

std::vector<uint8_t> EncodeProfile(const RankProfile& profile);
// kInvalidArgument for anything that EncodeProfile of this version did not write; *out is then unspecified.
Status DecodeProfile(const void* data, size_t size, RankProfile* out);

// kInvalidArgument when ranks differ in settings, in the list of (name, shape, dtype, wants a gradient), in order:
// names the first difference, both ranks and both values. Ranks that merely used a layer differently (factor dtype,
// bias) are no error: SFB is not allowed for that tensor. A rank that did not use a tensor in this step has no say in
// its verdict.
Status MergeProfiles(const std::vector<RankProfile>& by_rank, MergedProfile* out);

// kInvalidArgument when a gradient is sparse on one rank and dense on another, which would wait for each other for ever
// while nothing says how it travels: before the first plan. by_rank: what MergeProfiles has accepted.
Status CompareLayouts(const std::vector<RankProfile>& by_rank);

}  // namespace poseidon

#endif  // POSEIDON_CORE_PROFILE_H_
