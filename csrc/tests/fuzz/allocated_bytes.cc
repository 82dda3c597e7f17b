// Counts what is asked of operator new. In a source of its own, so that nothing else is compiled with the replaced
// operators in sight.
#include <cstdlib>
#include <new>

#include "tests/fuzz/fuzz.h"

namespace {

uint64_t allocated = 0;  // one thread

}  // namespace

namespace poseidon::fuzz {

uint64_t AllocatedBytes() { return allocated; }

}  // namespace poseidon::fuzz

void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  allocated += size;
  return std::malloc(size);
}
void* operator new(std::size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
