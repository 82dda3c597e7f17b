// Which code an input reached, where the build traces it (POSEIDON_FUZZ_COVERAGE, gcc's -fsanitize-coverage=trace-pc);
// else nothing is ever new.
#pragma once

#include <cstddef>

namespace poseidon {
namespace fuzz {

// Before an input.
void ForgetPath();
// After it: it went from one place to another where no input had before.
bool ReachedSomethingNew();
// Such steps so far.
size_t Reached();

}  // namespace fuzz
}  // namespace poseidon
