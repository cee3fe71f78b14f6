#include "faults.h"

#include <execinfo.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>

#include "memory.h"
#include "reports.h"
#include "scheduler.h"

namespace simulated_gpu {
namespace {

const char* g_begin = nullptr;
const char* g_end = nullptr;
struct sigaction g_before;
char g_how_to_repeat[128];

// In a signal handler, perhaps of a thread that is inside malloc: nothing is allocated here.
void describe(const char* address) {
  char text[512];
  const auto allocation = memory().find(address);
  int length =
      snprintf(text, sizeof text, "simulated GPU: %s at the device address %p",
               Scheduler::is_this_thread() ? "an operation of a stream reads or writes, untranslated,"
                                           : "host code reads or writes device memory",
               static_cast<const void*>(address));
  if (allocation) {
    length += snprintf(text + length, sizeof text - static_cast<size_t>(length),
                       ", %td bytes into the %zu bytes at %p of device %d", address - allocation->begin,
                       allocation->size, static_cast<void*>(allocation->begin), allocation->device);
  }
  length += snprintf(text + length, sizeof text - static_cast<size_t>(length),
                     "%s. A GPU's driver would end the process here, too.\n  %s; C++ stack:\n",
                     allocation ? "" : ", which is in no allocation", g_how_to_repeat);
  if (write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) {
    return;
  }
  constexpr int kFrames = 48;
  void* frames[kFrames];
  backtrace_symbols_fd(frames, backtrace(frames, kFrames), STDERR_FILENO);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  // Another handler that is done raises the signal again, without the address: when we return, the
  // instruction faults once more, with it.
  static bool returned = false;
  if (info->si_code == SI_TKILL && !returned) {
    returned = true;
    return;
  }
  const auto* const address = static_cast<const char*>(info->si_addr);
  if (info->si_code > 0 && address >= g_begin && address < g_end) {
    describe(address);
  }
  sigaction(SIGSEGV, &g_before, nullptr);
  if ((g_before.sa_flags & SA_SIGINFO) != 0 && g_before.sa_sigaction != nullptr) {
    g_before.sa_sigaction(signal, info, context);
  } else if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(signal);
  }
}

}  // namespace

void report_faults_in(const void* window, size_t size) {
  g_begin = static_cast<const char*>(window);
  g_end = g_begin + size;
  snprintf(g_how_to_repeat, sizeof g_how_to_repeat, "%s", how_to_repeat().c_str());
  void* frame = nullptr;
  backtrace(&frame, 1);  // the first call loads a library
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &g_before);
}

}  // namespace simulated_gpu
