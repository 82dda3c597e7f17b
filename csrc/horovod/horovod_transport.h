// Transport over Horovod's own tensor queue. The implementation is the only source file that includes Horovod's
// headers.
#pragma once

#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/transport/transport.h"

namespace poseidon {

// Requires hvd.init() before the first call; every call before that fails with kUnavailable, and after a shutdown with
// kAborted. Stateless.
std::unique_ptr<Transport> MakeHorovodTransport();

// Compares the layout of Horovod's Status, as the loaded library really returns it, with the one this file was compiled
// for. HAVE_GPU changes it, and a mismatch would corrupt the stack at the first call.
Status CheckHorovodLayout();

// File of the shared library that the enqueue functions are bound to. Another framework's Horovod library exports the
// same symbols; binding to that one would enqueue into a queue that nobody serves.
std::string HorovodLibraryPath();

// The Horovod version whose headers this was compiled with.
const char* CompiledHorovodVersion();

}  // namespace poseidon
