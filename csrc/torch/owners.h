// Which session was the first to have a parameter. Another one that has it too must not reduce the same .grad at the same time.
#pragma once

#include <ATen/ATen.h>

namespace poseidon {

class Session;

// True: nobody else has it, and it is the session's until ReleaseParameters. Any thread.
bool OwnParameter(const at::Tensor& param, const Session* session);
void ReleaseParameters(const Session* session);

}  // namespace poseidon
