#include "tests/fuzz/coverage.h"

#include <cstdint>

namespace poseidon {
namespace fuzz {
namespace {

constexpr size_t kSteps = 1 << 16;
bool taken[kSteps];  // a step is known by a hash of both its ends
size_t reached = 0;
size_t reached_before = 0;
uint64_t last = 0;

}  // namespace

void ForgetPath() {
  last = 0;
  reached_before = reached;
}
bool ReachedSomethingNew() { return reached > reached_before; }
size_t Reached() { return reached; }

}  // namespace fuzz
}  // namespace poseidon

// Called by every block of the traced code. Addresses count from one of our own, since the program lies elsewhere in
// every run.
extern "C" void __sanitizer_cov_trace_pc() {
  using namespace poseidon::fuzz;
  const uint64_t place = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(__builtin_return_address(0)) -
                                               reinterpret_cast<uintptr_t>(&ForgetPath));
  const uint64_t mixed = place * 0x9e3779b97f4a7c15 >> 40;
  bool& step = taken[(mixed ^ last) % kSteps];
  reached += step ? 0 : 1;
  step = true;
  last = mixed >> 1;
}
