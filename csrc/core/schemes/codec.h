// What gradients and factors become for the way between ranks. Pure, any thread.
#pragma once

#include "core/base/dtype.h"
#include "core/transport/transport.h"

namespace poseidon {

class Codec {
 public:
  virtual ~Codec() = default;

  virtual const char* name() const = 0;
  // The dtype in which values of `dtype` travel.
  virtual DType WireDType(DType dtype) const = 0;
  // Whether a value may lose digits.
  virtual bool lossy() const = 0;
};

// Live as long as the process.
const Codec& IdentityCodec();
// Compression.fp16 of Horovod: every floating dtype travels as float16.
const Codec& HalfCodec();

// How a session's values travel: what the codec makes of them, and then what the transport can add up.
struct WireFormat {
  const Codec* codec = &IdentityCodec();
  Traits traits;

  // In an allreduce.
  DType Reduced(DType gradient) const { return traits.ReducedAs(codec->WireDType(gradient)); }
  // In an allgather, which moves bytes and does no arithmetic.
  DType Gathered(DType factor) const { return codec->WireDType(factor); }
};

}  // namespace poseidon
