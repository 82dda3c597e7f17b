#include "torch/owners.h"

#include <mutex>
#include <unordered_map>

namespace poseidon {

namespace {

std::mutex mutex;

std::unordered_map<const c10::TensorImpl*, const Session*>& Owners() {
  static auto* owners = new std::unordered_map<const c10::TensorImpl*, const Session*>();  // sessions may end after static objects
  return *owners;
}

}  // namespace

bool OwnParameter(const at::Tensor& param, const Session* session) {
  std::lock_guard<std::mutex> lock(mutex);
  return Owners().emplace(param.unsafeGetTensorImpl(), session).first->second == session;
}

void ReleaseParameters(const Session* session) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto it = Owners().begin(); it != Owners().end();) it = it->second == session ? Owners().erase(it) : std::next(it);
}

}  // namespace poseidon
