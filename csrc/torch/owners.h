// Which session was the first to have a parameter. Another one that has it too must not reduce the same .grad at the
// same time.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace poseidon {

class Session;

// True: nobody else has it, and it is the session's until ReleaseParameters. Any thread.
bool OwnParameter(const at::Tensor& param, const Session* session);
void ReleaseParameters(const Session* session);

// For messages: the optimizers of this process, by the number that their wire names carry. A rank that has made one
// more than the others waits for a number that they do not have.
void NameSession(const Session* session, const std::string& description);
void ForgetSession(const Session* session);
std::string DescribeSessions();

}  // namespace poseidon
