// Forks of this process, and objects that outlive them.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <mutex>
#include <utility>

namespace funcol {

// Returns the number of forks between the process that loaded funcol and this one: 0 outside of forks.
uint64_t num_forks() noexcept;

// The only object of class T, which derives from this class. It is made at the first use and never destroyed:
// threads may use it, and tensors may be destroyed, while the process exits.
//
// A fork waits until no thread holds the mutex. The child calls T::reset_in_child() under the mutex.
template <typename T>
class ForkSafe {
 public:
  static T& instance() {
    static auto* const object = new T();  // NOLINT(cppcoreguidelines-owning-memory)
    return *object;
  }

 protected:
  ForkSafe() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     instance().reset_in_child();
                     instance().mutex_.unlock();
                   });
  }

  // Empties `value` in the child without destroying its content, which would disturb the parent's threads.
  template <typename Value>
  static void leak(Value& value) {
    new Value(std::exchange(value, Value()));  // NOLINT(cppcoreguidelines-owning-memory)
  }

  std::mutex mutex_;
};

}  // namespace funcol
