#include "core/schemes/codec.h"

#include "horovod/traits.h"
#include "tests/check.h"

namespace poseidon {
namespace {

TEST(WhatCannotBeAddedUpTravelsWider) {
  WireFormat plain;
  POSEIDON_CHECK_EQ(plain.Reduced(DType::kBFloat16), DType::kBFloat16);
  plain.traits = HorovodTraits();
  POSEIDON_CHECK_EQ(plain.Reduced(DType::kBFloat16), DType::kFloat32);
  POSEIDON_CHECK_EQ(plain.Reduced(DType::kFloat16), DType::kFloat16);
  POSEIDON_CHECK_EQ(plain.Reduced(DType::kFloat64), DType::kFloat64);
  POSEIDON_CHECK_EQ(plain.Gathered(DType::kBFloat16), DType::kBFloat16);
}

TEST(HalfIsForFloatingNumbers) {
  WireFormat half;
  half.codec = &HalfCodec();
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    POSEIDON_CHECK_EQ(half.Reduced(dtype), DType::kFloat16);
    POSEIDON_CHECK_EQ(half.Gathered(dtype), DType::kFloat16);
  }
  POSEIDON_CHECK_EQ(half.Reduced(DType::kInt64), DType::kInt64);
  POSEIDON_CHECK_EQ(half.Gathered(DType::kOther), DType::kOther);
  POSEIDON_CHECK(HalfCodec().lossy() && !IdentityCodec().lossy());
}

}  // namespace
}  // namespace poseidon
