#include "async/pending_dump.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "async/in_flight.h"

namespace funcol {
namespace {

constexpr int kNone = -1;

// The state that the handler of a signal reads without locks.
struct SignalState {
  std::atomic<int> file_descriptor{kNone};
  struct sigaction before {};
  bool is_installed = false;  // on_signal() is the handler, or a later one calls it
};

std::array<SignalState, NSIG> signal_states;
std::atomic<int> pipe_end{kNone};  // to the thread that writes
int read_end = kNone;
std::mutex mutex;  // of all that follows, but for handlers
bool has_thread = false;

void write_all(int file_descriptor, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const auto count = ::write(file_descriptor, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) {
      return;
    }
    done += count < 0 ? 0 : static_cast<size_t>(count);
  }
}

void on_signal(int signal, siginfo_t* info, void* context) {
  const int errno_before = errno;
  auto& own = signal_states.at(static_cast<size_t>(signal));
  const auto number = static_cast<unsigned char>(signal);
  if (own.file_descriptor.load() != kNone) {
    [[maybe_unused]] const auto count = ::write(pipe_end.load(), &number, 1);
  }
  errno = errno_before;
  const auto& before = own.before;
  if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
    return;
  }
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(signal, info, context);
  } else {
    before.sa_handler(signal);
  }
}

void run(int end) {
  unsigned char number = 0;
  while (true) {
    const auto count = ::read(end, &number, 1);
    if (count == 1) {
      const int file_descriptor = signal_states.at(number).file_descriptor.load();
      if (file_descriptor != kNone) {
        write_all(file_descriptor, in_flight_text(collectives_in_flight(QueriedWorks::kOnCpu)));
      }
    } else if (count == 0 || errno != EINTR) {
      return;
    }
  }
}

// Starts the thread that writes. Needs the mutex.
void start_thread() {
  std::array<int, 2> ends{};
  TORCH_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0,
              "funcol::dump_pending_on: no pipe: ", std::strerror(errno));
  ::fcntl(ends[1], F_SETFL, O_NONBLOCK);  // a handler must not wait
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the program's threads take the signals
  std::thread([end = ends[0]] { run(end); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pipe_end.store(ends[1]);
  read_end = ends[0];
  has_thread = true;
}

}  // namespace

void dump_in_flight_on(int signal, int file_descriptor) {
  const std::scoped_lock lock(mutex);
  TORCH_CHECK_VALUE(signal > 0 && signal < NSIG, "funcol::dump_pending_on: the signal is ", signal,
                    ". Expected one from 1 to ", NSIG - 1, ", such as signal.SIGUSR1.");
  if (!has_thread) {
    static const int forks = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                                            [] {
                                              ::close(pipe_end.exchange(kNone));  // the parent's
                                              ::close(read_end);
                                              has_thread = false;
                                              mutex.unlock();
                                            });
    TORCH_INTERNAL_ASSERT(forks == 0);
    start_thread();
  }
  auto& own = signal_states.at(static_cast<size_t>(signal));
  own.file_descriptor.store(file_descriptor);
  if (own.is_installed) {
    return;
  }
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  ::sigaction(signal, nullptr, &own.before);  // on_signal() may run as soon as it is put
  if (::sigaction(signal, &action, nullptr) != 0) {
    own.file_descriptor.store(kNone);
    TORCH_CHECK(false, "funcol::dump_pending_on: signal ", signal,
                " takes no handler: ", std::strerror(errno), ". Pass another, such as signal.SIGUSR1.");
  }
  own.is_installed = true;
}

bool stop_dumping_in_flight_on(int signal) {
  const std::scoped_lock lock(mutex);
  if (signal <= 0 || signal >= NSIG) {
    return false;
  }
  auto& own = signal_states.at(static_cast<size_t>(signal));
  if (own.file_descriptor.exchange(kNone) == kNone) {
    return false;
  }
  struct sigaction current {};
  ::sigaction(signal, nullptr, &current);
  if (current.sa_sigaction == on_signal) {  // else a later handler calls ours, which does nothing now
    ::sigaction(signal, &own.before, nullptr);
    own.is_installed = false;
  }
  return true;
}

void follow_fork_of_dumps() {
  const std::scoped_lock lock(mutex);
  for (const auto& own : signal_states) {
    if (own.file_descriptor.load() != kNone && !has_thread) {
      start_thread();
    }
  }
}

}  // namespace funcol
