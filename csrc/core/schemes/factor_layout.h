// Packing rules of an SFB or row-sparse message. An SFB message is a dense row-major matrix with one row per sample
//
//     [ x (N elements) | d (M elements) | flag (1 element) ]
//
// in the factors' wire dtype, so the allgather of all ranks' messages holds x_all and d_all as strided blocks in rank
// order and needs no unpacking.
//
// In a row-sparse message (an embedding is a layer whose x is one-hot) the id of the table's row stands in x's place,
// as raw bits in as many elements as 4 bytes need (IdElements), and d has the D elements of that row:
//
//     [ id (4 bytes, padded to elements) | d (D elements) | flag (1 element) ]
//
// Ids differ within a rank's block: a rank adds up what belongs to one row before it sends.
//
// The flag element is an unsigned integer of the element's width, NOT a number of that dtype: as a float it would be a
// denormal, which conversion or arithmetic may flush. Write it after any dtype conversion. Flags sit in the first row
// of each rank's block and are 0 elsewhere. A rank with flags but no rows sends one row of zeros, which adds nothing to
// d^T x. In float16 the element's upper bits hold the row's scales (row_scales.h), in every row.
//
// Pure functions on host memory, any thread. No alignment is required. For a message on a device, copy its flag column
// to the host and use the functions with a layout of {0, 0}, whose rows are the flag alone.
#ifndef POSEIDON_CORE_FACTOR_LAYOUT_H_
#define POSEIDON_CORE_FACTOR_LAYOUT_H_

#include <cstdint>
#include <string>

#include "core/base/dtype.h"
#include "core/base/status.h"

namespace poseidon {

// This rank holds a gradient of weight / bias that its factors do not cover; all ranks follow up with an allreduce.
constexpr uint32_t kFlagExtraWeight = 1u << 0;
constexpr uint32_t kFlagExtraBias = 1u << 1;
// And it came in a step in which backward reached the layer: evidence that its calls do not give all of its gradient.
// Without this flag the extra part is what the user left or put into .grad, such as the result of a synchronize() that
// is followed by another.
constexpr uint32_t kFlagForeign = 1u << 2;

// Flags are bits below this one, in every dtype.
constexpr int kFlagBits = 4;

// Offsets and widths in elements. Row-sparse: in_features is IdElements(dtype), out_features is D.
struct FactorLayout {
  int64_t in_features = 0;   // N
  int64_t out_features = 0;  // M

  int64_t x_offset() const { return 0; }
  int64_t d_offset() const { return in_features; }
  int64_t flag_offset() const { return in_features + out_features; }
  int64_t row_elements() const { return in_features + out_features + 1; }
};

// Rows of the message of a rank that has `rows` rows of factors.
int64_t MessageRows(int64_t rows, uint32_t flags);

// Writes the flags of a whole message: `flags` in the first row, 0 in the others. `rows` is MessageRows(). x, d and
// scales are left alone, so the caller zeroes the row of a message that has none.
void WriteFlag(void* message, int64_t rows, uint32_t flags, const FactorLayout& layout, DType dtype);

// OR of all flags. Reads all rows: where a rank's block starts is not needed.
uint32_t ReadFlags(const void* gathered, int64_t total_rows, const FactorLayout& layout, DType dtype);

// Elements that an id takes in a message of this dtype: 2 of a 16-bit type, else 1. Such a type has at least 2 bytes.
int64_t IdElements(DType dtype);
// At the beginning of a row. Never through a number of that dtype: conversion or arithmetic could change its bits.
void WriteId(void* row, uint32_t id, DType dtype);
uint32_t ReadId(const void* row, DType dtype);

// kInvalidArgument if the gathered message of `total_rows` (all ranks) is too large for one collective of
// `max_elements`. Every rank must see the same total_rows, or only some would fail.
Status CheckElementCount(int64_t total_rows, const FactorLayout& layout, int64_t max_elements, const std::string& name);

}  // namespace poseidon

#endif  // POSEIDON_CORE_FACTOR_LAYOUT_H_
