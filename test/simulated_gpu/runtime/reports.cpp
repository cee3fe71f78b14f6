#include "reports.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace simulated_gpu {
namespace {

constexpr int kStatusAfterReports = 66;  // as the thread sanitizer's
constexpr int kMostReports = 20;         // printed; the rest is counted

struct Reports {
  std::mutex mutex;
  int count = 0;
  std::string text;
  std::string taken;
};

Reports& reports() {
  static auto* const reports = new Reports();
  return *reports;
}

const char* name_of(Options::Order order) {
  switch (order) {
    case Options::Order::kLast:
      return "last";
    case Options::Order::kLazy:
      return "lazy";
    case Options::Order::kFirst:
      return "first";
    case Options::Order::kRandom:
      break;
  }
  return "random";
}

// A program that would have ended well has not, unless the reports were taken.
void fail_at_exit(int status, void* /*unused*/) {
  if (!reports().text.empty()) {
    fprintf(stderr, "simulated GPU: %d reports\n", reports().count);
    fflush(nullptr);
    _exit(status == 0 ? kStatusAfterReports : status);
  }
}

}  // namespace

std::string how_to_repeat() {
  const Options& o = options();
  std::string text = "--seed " + std::to_string(o.seed) + " --order " + name_of(o.order);
  if (o.delay_us != 0) {
    text += " --delay-us " + std::to_string(o.delay_us);
  }
  return text;
}

void report(const std::string& text) {
  const std::scoped_lock lock(reports().mutex);
  if (reports().count == 0) {
    on_exit(fail_at_exit, nullptr);
  }
  if (++reports().count > kMostReports) {
    return;
  }
  const std::string whole = "simulated GPU: " + text + "\n  process " + std::to_string(getpid()) +
                            "; the same run again: tools/simulated_gpu " + how_to_repeat() + " COMMAND\n";
  fputs(whole.c_str(), stderr);
  reports().text += whole;
}

}  // namespace simulated_gpu

int simulated_gpu_num_reports() {
  const std::scoped_lock lock(simulated_gpu::reports().mutex);
  return simulated_gpu::reports().count;
}

const char* simulated_gpu_take_reports() {
  auto& reports = simulated_gpu::reports();
  const std::scoped_lock lock(reports.mutex);
  reports.taken = std::move(reports.text);
  reports.text.clear();
  reports.count = 0;
  return reports.taken.c_str();
}
