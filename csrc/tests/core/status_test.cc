#include "core/base/status.h"

#include "tests/check.h"

namespace poseidon {
namespace {

TEST(DefaultIsOk) {
  const Status status;
  POSEIDON_CHECK(status.ok());
  POSEIDON_CHECK_EQ(status.code(), StatusCode::kOk);
  POSEIDON_CHECK_EQ(Status::OK().ToString(), "OK");
  POSEIDON_CHECK_EQ(status.message(), "");
}

TEST(FactoriesKeepCodeAndMessage) {
  const std::vector<std::pair<Status, StatusCode>> cases = {
      {Status::InvalidArgument("m"), StatusCode::kInvalidArgument},
      {Status::FailedPrecondition("m"), StatusCode::kFailedPrecondition},
      {Status::Aborted("m"), StatusCode::kAborted},
      {Status::Internal("m"), StatusCode::kInternal},
      {Status::Unavailable("m"), StatusCode::kUnavailable},
      {Status::Assertion("m"), StatusCode::kAssertion},
  };
  for (const auto& [status, code] : cases) {
    POSEIDON_CHECK(!status.ok());
    POSEIDON_CHECK_EQ(status.code(), code);
    POSEIDON_CHECK_EQ(status.message(), "m");
    POSEIDON_CHECK_EQ(status.ToString(), std::string(Name(code)) + ": m");
  }
}

}  // namespace
}  // namespace poseidon
