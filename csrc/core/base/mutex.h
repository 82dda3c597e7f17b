// A mutex that clang's thread safety analysis knows (tools/check_locks.py runs it; other compilers ignore the words).
#pragma once

#include <mutex>

#if defined(__clang__)
#define POSEIDON_ANNOTATE(x) __attribute__((x))
#else
#define POSEIDON_ANNOTATE(x)
#endif

// A member that may be touched only with that mutex held, a method to be called with it held, and a function whose body
// is not checked, such as a callback that is called with it held.
#define POSEIDON_GUARDED_BY(mutex) POSEIDON_ANNOTATE(guarded_by(mutex))
#define POSEIDON_REQUIRES(mutex) POSEIDON_ANNOTATE(requires_capability(mutex))
#define POSEIDON_UNCHECKED POSEIDON_ANNOTATE(no_thread_safety_analysis)

namespace poseidon {

class POSEIDON_ANNOTATE(capability("mutex")) Mutex {
 public:
  void lock() POSEIDON_ANNOTATE(acquire_capability()) { mutex_.lock(); }
  void unlock() POSEIDON_ANNOTATE(release_capability()) { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class POSEIDON_ANNOTATE(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) POSEIDON_ANNOTATE(acquire_capability(mutex)) : mutex_(mutex) { mutex_.lock(); }
  ~Lock() POSEIDON_ANNOTATE(release_capability()) { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // For condition_variable_any, which locks it again before it returns.
  void lock() POSEIDON_UNCHECKED { mutex_.lock(); }
  void unlock() POSEIDON_UNCHECKED { mutex_.unlock(); }

 private:
  Mutex& mutex_;
};

// Lets go of a mutex that the caller holds, for as long as it lives: around whatever waits for other ranks, or runs
// code of the user's. What the mutex guards may be another afterwards. The analysis does not see it.
class Unlocked {
 public:
  explicit Unlocked(Mutex& mutex) POSEIDON_UNCHECKED : mutex_(mutex) { mutex_.unlock(); }
  ~Unlocked() POSEIDON_UNCHECKED { mutex_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace poseidon
