// Minimal test harness. Include it once, in the one source of a test executable: it defines main(), which runs every
// TEST of the file and returns non-zero if any check failed. A failed CHECK is counted and the test goes on, from any
// thread; a failed REQUIRE ends the process, for what later lines rely on.
#ifndef POSEIDON_TESTS_CHECK_H_
#define POSEIDON_TESTS_CHECK_H_

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace poseidon {
namespace check {

struct TestCase {
  const char* name;
  void (*run)();
};
inline std::vector<TestCase>& Tests() {
  static std::vector<TestCase> tests;
  return tests;
}
inline std::atomic<int>& Failures() {
  static std::atomic<int> failures{0};
  return failures;
}
struct Registrar {
  Registrar(const char* name, void (*run)()) { Tests().push_back({name, run}); }
};

template <typename T>
std::string Text(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_enum_v<T>) {
    out << "enum " << static_cast<long long>(value);
  } else if constexpr (std::is_same_v<T, uint8_t> || std::is_same_v<T, int8_t>) {
    out << static_cast<int>(value);
  } else {
    out << std::boolalpha << value;
  }
  return out.str();
}
template <typename T>
std::string Text(const std::vector<T>& values) {
  std::string out = "[";
  for (const T& value : values) out += (out.size() > 1 ? ", " : "") + Text(value);
  return out + "]";
}

inline void Report(const char* file, int line, const std::string& what, bool fatal = false) {
  ++Failures();
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
  if (fatal) std::abort();
}
template <typename A, typename B>
void Equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!(a == b)) Report(file, line, std::string(text) + "\n  left:  " + Text(a) + "\n  right: " + Text(b));
}
inline void Near(const char* file, int line, const char* text, double a, double b, double tolerance) {
  if (!(std::fabs(a - b) <= tolerance)) {
    Report(file, line, std::string(text) + "\n  left:  " + Text(a) + "\n  right: " + Text(b));
  }
}
inline void Contains(const char* file, int line, const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) Report(file, line, "\"" + text + "\" lacks \"" + part + "\"");
}
template <typename S>
void Ok(const char* file, int line, const char* text, const S& status, bool fatal) {
  if (!status.ok()) Report(file, line, std::string(text) + " is " + status.ToString(), fatal);
}

}  // namespace check
}  // namespace poseidon

#define TEST(name)                                                          \
  static void name();                                                       \
  static const ::poseidon::check::Registrar registrar_##name(#name, &name); \
  static void name()

// All are variadic so that an argument may hold commas, as in std::vector<int>{1, 2}.
#define POSEIDON_CHECK(...)                                                          \
  do {                                                                               \
    if (!(__VA_ARGS__)) ::poseidon::check::Report(__FILE__, __LINE__, #__VA_ARGS__); \
  } while (0)
#define POSEIDON_REQUIRE(...)                                                              \
  do {                                                                                     \
    if (!(__VA_ARGS__)) ::poseidon::check::Report(__FILE__, __LINE__, #__VA_ARGS__, true); \
  } while (0)
// (a, b): a == b.
#define POSEIDON_CHECK_EQ(...) ::poseidon::check::Equal(__FILE__, __LINE__, "equal(" #__VA_ARGS__ ")", __VA_ARGS__)
// (a, b, absolute tolerance); NaN fails.
#define POSEIDON_CHECK_NEAR(...) ::poseidon::check::Near(__FILE__, __LINE__, "near(" #__VA_ARGS__ ")", __VA_ARGS__)
// (text, part).
#define POSEIDON_CHECK_CONTAINS(...) ::poseidon::check::Contains(__FILE__, __LINE__, __VA_ARGS__)
// (status).
#define POSEIDON_CHECK_OK(...) ::poseidon::check::Ok(__FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__, false)
#define POSEIDON_REQUIRE_OK(...) ::poseidon::check::Ok(__FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__, true)

int main() {
  for (const auto& test : ::poseidon::check::Tests()) {
    const int before = ::poseidon::check::Failures();
    test.run();
    std::printf("%s %s\n", ::poseidon::check::Failures() == before ? "ok    " : "FAILED", test.name);
    std::fflush(stdout);
  }
  return ::poseidon::check::Failures() == 0 ? 0 : 1;
}

#endif  // POSEIDON_TESTS_CHECK_H_
