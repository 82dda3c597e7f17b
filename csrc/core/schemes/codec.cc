#include "core/schemes/codec.h"

namespace poseidon {
namespace {

class Identity final : public Codec {
 public:
  const char* name() const override { return "none"; }
  DType WireDType(DType dtype) const override { return dtype; }
  bool lossy() const override { return false; }
};

class Half final : public Codec {
 public:
  const char* name() const override { return "fp16"; }
  DType WireDType(DType dtype) const override { return IsFloating(dtype) ? DType::kFloat16 : dtype; }
  bool lossy() const override { return true; }
};

}  // namespace

const Codec& IdentityCodec() {
  static const Identity codec;
  return codec;
}

const Codec& HalfCodec() {
  static const Half codec;
  return codec;
}

}  // namespace poseidon
