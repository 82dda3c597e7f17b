// core_fuzz TARGET|all [--seconds S] [--runs N] [--seed N] [--corpus FOLDER]
//
// Feeds a target its seeds, the files of FOLDER/TARGET, and mutations of both for S seconds or N runs, whichever ends
// first. A file whose name begins with "accepted" must be accepted, with "refused" refused. An input that breaks the
// property, crashes or computes for twenty seconds is written to crash-TARGET in the current folder; put it into the
// corpus with its fix. Of formats that change the corpus has refused ones only, which stay so: what is valid is made by
// the encoder (Target::seeds).
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "tests/fuzz/coverage.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/mutator.h"

extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));

namespace poseidon {
namespace fuzz {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const Target* kTargets[] = {&kProfileTarget, &kPlanTarget,    &kMeasurementsTarget, &kBlocksTarget,
                                      &kFactorsTarget, &kNumbersTarget, &kTextTarget};
constexpr size_t kMostBytes = 2048;  // of an input
constexpr size_t kMostInputs = 2000;
constexpr time_t kMostSeconds = 20;  // of the processor, for one run

struct Options {
  std::string target;
  double seconds = 1;
  uint64_t runs = ~uint64_t{0};
  uint64_t seed = 1;
  std::string corpus;
};

// What runs now, for whoever ends the process.
const Target* current_target = nullptr;
const Bytes* current_input = nullptr;

// Safe in a signal handler.
void SaveInput() {
  if (current_input == nullptr) return;
  char path[64] = "crash-";
  std::strncat(path, current_target->name, sizeof(path) - 8);
  const int file = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
  if (file < 0 || write(file, current_input->data(), current_input->size()) < 0) return;
  close(file);
  const char* texts[] = {"core_fuzz: the input is in ", path, "\n"};
  for (const char* text : texts) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
  }
  current_input = nullptr;
}

void OnSignal(int number) {
  if (number == SIGVTALRM) {
    constexpr char kText[] = "core_fuzz: a run does not end\n";
    if (write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0) _exit(2);
  }
  SaveInput();
  signal(number, SIG_DFL);
  raise(number);
}

void SaveInputOfCrashes() {
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGVTALRM}) signal(number, OnSignal);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(SaveInput);
}

bool Run(const Target& target, const Bytes& input) {
  current_target = &target;
  current_input = &input;
  const itimerval most{{0, 0}, {kMostSeconds, 0}};
  setitimer(ITIMER_VIRTUAL, &most, nullptr);
  ForgetPath();
  const bool accepted = target.run(input);
  current_input = nullptr;
  return accepted;
}

struct File {
  std::string name;
  Bytes bytes;
};

std::vector<File> ReadCorpus(const std::string& folder) {
  std::vector<File> files;
  DIR* directory = opendir(folder.c_str());
  if (directory == nullptr) return files;
  while (const dirent* entry = readdir(directory)) {
    if (entry->d_name[0] == '.') continue;
    std::ifstream stream(folder + "/" + entry->d_name, std::ios::binary);
    files.push_back({entry->d_name, Bytes(std::istreambuf_iterator<char>(stream), {})});
  }
  closedir(directory);
  std::sort(files.begin(), files.end(),
            [](const File& a, const File& b) { return a.name < b.name; });  // readdir's order is its own
  return files;
}

// The inputs to start from, each of them as it should be; empty if one is not.
std::vector<Bytes> FirstInputs(const Target& target, const Options& options) {
  std::vector<Bytes> inputs = target.seeds();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (Run(target, inputs[i])) continue;
    std::fprintf(stderr, "core_fuzz: %s refuses its seed %zu\n", target.name, i);
    return {};
  }
  std::vector<File> files = ReadCorpus(options.corpus + "/" + target.name);
  if (files.empty() && !options.corpus.empty()) {
    std::fprintf(stderr, "core_fuzz: no files in %s/%s\n", options.corpus.c_str(), target.name);
    return {};
  }
  for (File& file : files) {
    const bool accepted = Run(target, file.bytes);
    if (file.name.rfind(accepted ? "refused" : "accepted", 0) == 0) {
      std::fprintf(stderr, "core_fuzz: %s %s %s\n", target.name, accepted ? "accepts" : "refuses", file.name.c_str());
      return {};
    }
    inputs.push_back(std::move(file.bytes));
  }
  return inputs;
}

bool Fuzz(const Target& target, const Options& options) {
  std::vector<Bytes> inputs = FirstInputs(target, options);
  if (inputs.empty()) return false;
  const size_t first = inputs.size();
  Mutator mutator(options.seed);
  uint64_t runs = 0, accepted = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(options.seconds);
  for (; runs < options.runs && Clock::now() < end; ++runs) {
    const Bytes input =
        mutator.Mutate(inputs[mutator.Below(inputs.size())], inputs[mutator.Below(inputs.size())], kMostBytes);
    accepted += Run(target, input) ? 1 : 0;
    if (ReachedSomethingNew() && inputs.size() < kMostInputs) inputs.push_back(input);
  }
  std::printf("%-12s %9llu runs, %8llu accepted, %5zu inputs found, %6zu steps in the code: %s\n", target.name,
              static_cast<unsigned long long>(runs), static_cast<unsigned long long>(accepted), inputs.size() - first,
              Reached(), target.property);
  std::fflush(stdout);
  // Inputs of which none gets past the decoder test nothing behind it.
  if (accepted > 0) return true;
  std::fprintf(stderr, "core_fuzz: no mutated input of %s was accepted\n", target.name);
  return false;
}

int Usage() {
  std::fprintf(stderr, "core_fuzz TARGET|all [--seconds S] [--runs N] [--seed N] [--corpus FOLDER]; targets:");
  for (const Target* target : kTargets) std::fprintf(stderr, " %s", target->name);
  std::fprintf(stderr, "\n");
  return 2;
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (argument.rfind("--", 0) != 0) {
      options.target = argument;
      continue;
    }
    if (value == nullptr) return Usage();
    ++i;
    if (argument == "--seconds") {
      options.seconds = std::atof(value);
    } else if (argument == "--runs") {
      options.runs = std::strtoull(value, nullptr, 10);
    } else if (argument == "--seed") {
      options.seed = std::strtoull(value, nullptr, 10);
    } else if (argument == "--corpus") {
      options.corpus = value;
    } else {
      return Usage();
    }
  }
  SaveInputOfCrashes();
  const size_t count = options.target == "all" ? std::size(kTargets) : 1;
  options.seconds /= static_cast<double>(count);
  bool found = false, good = true;
  for (const Target* target : kTargets) {
    if (options.target != "all" && options.target != target->name) continue;
    found = true;
    good = Fuzz(*target, options) && good;
  }
  if (!found) return Usage();
  return good ? 0 : 1;
}

}  // namespace

void Require(bool holds, const char* file, int line, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, what);
  std::abort();
}

}  // namespace fuzz
}  // namespace poseidon

int main(int argc, char** argv) { return poseidon::fuzz::Main(argc, argv); }
