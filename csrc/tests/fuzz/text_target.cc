// Text of the user's: names of schemes, policies and methods.
#include "core/plan/dense_layout.h"
#include "core/schemes/scheme.h"
#include "tests/fuzz/fuzz.h"

namespace poseidon {
namespace fuzz {
namespace {

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (const std::string text : {"auto", "lazy", "lazy:1000000", "priority:4e6", "time", "sfb", "row-sparse", "bytes",
                                 "sparse_allgather", "wfbp"}) {
    seeds.emplace_back(text.begin(), text.end());
  }
  return seeds;
}

// Parsed by its name alone, or refused with a message that lists some name and leaves the value alone.
template <typename T>
bool IsName(Status (*parse)(const std::string&, T*), const std::string& text) {
  T value{};
  const Status status = parse(text, &value);
  if (status.ok()) {
    FUZZ_REQUIRE(text == Name(value));
    return true;
  }
  FUZZ_REQUIRE(value == T{} && status.message().find("allreduce") != std::string::npos);
  return false;
}

bool IsDense(const std::string& text) {
  DenseSettings settings;
  const int64_t theta = settings.theta;
  if (!ParseDense(text, &settings).ok()) {
    FUZZ_REQUIRE(settings.method == DenseMethod::kAuto && settings.theta == theta);
    return false;
  }
  FUZZ_REQUIRE(text.substr(0, text.find(':')) == Name(settings.method));
  FUZZ_REQUIRE(settings.theta >= 1 && settings.theta <= int64_t{1000000000000});
  return true;
}

bool Run(const Bytes& input) {
  const std::string text(input.begin(), input.end());
  const bool names[] = {IsName(ParseScheme, text), IsName(ParsePolicy, text), IsName(ParseSchemeOverride, text),
                        IsDense(text)};
  return names[0] || names[1] || names[2] || names[3];
}

}  // namespace

const Target kTextTarget = {"text", "a value has the one spelling of its name, and numbers lie in their range", Seeds,
                            Run};

}  // namespace fuzz
}  // namespace poseidon
