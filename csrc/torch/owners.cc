#include "torch/owners.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace poseidon {

namespace {

std::mutex mutex;

std::unordered_map<const c10::TensorImpl*, const Session*>& Owners() {
  static auto* owners =
      new std::unordered_map<const c10::TensorImpl*, const Session*>();  // sessions may end after static objects
  return *owners;
}

std::unordered_map<const Session*, std::string>& Descriptions() {
  static auto* descriptions = new std::unordered_map<const Session*, std::string>();
  return *descriptions;
}

}  // namespace

bool OwnParameter(const at::Tensor& param, const Session* session) {
  std::lock_guard<std::mutex> lock(mutex);
  return Owners().emplace(param.unsafeGetTensorImpl(), session).first->second == session;
}

void ReleaseParameters(const Session* session) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto it = Owners().begin(); it != Owners().end();)
    it = it->second == session ? Owners().erase(it) : std::next(it);
}

void NameSession(const Session* session, const std::string& description) {
  std::lock_guard<std::mutex> lock(mutex);
  Descriptions()[session] = description;
}

void ForgetSession(const Session* session) {
  std::lock_guard<std::mutex> lock(mutex);
  Descriptions().erase(session);
}

std::string DescribeSessions() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::string> all;
  for (const auto& entry : Descriptions()) all.push_back(entry.second);
  std::sort(all.begin(), all.end());
  std::string text;
  for (const std::string& each : all) text += (text.empty() ? "" : ", ") + each;
  return text;
}

}  // namespace poseidon
