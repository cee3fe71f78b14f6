#include "comm/call_site.h"

#include <ATen/record_function.h>

#include <atomic>
#include <ctime>
#include <utility>

#include "compat/work_names.h"

namespace funcol {
namespace {

std::atomic<bool> records_callers{false};

Text find_none() { return nullptr; }
std::atomic<FindCaller> find_caller{find_none};

thread_local const Label* innermost = nullptr;
thread_local Text module_now;

// The coarse clock is read in a quarter of the time of std::chrono's.
int64_t now_ms() noexcept {
  std::timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1'000'000;
}

}  // namespace

CallSite CallSite::now() {
  CallSite started{.at_ms = now_ms(), .caller = {}, .purpose = {}};
  if (callers_are_recorded()) {
    started.caller = find_caller.load(std::memory_order_relaxed)();
    started.purpose = current_purpose();
  }
  return started;
}

double CallSite::seconds() const { return static_cast<double>(now_ms() - at_ms) / 1000; }

void record_callers(bool enabled) { records_callers.store(enabled, std::memory_order_relaxed); }

bool callers_are_recorded() noexcept { return records_callers.load(std::memory_order_relaxed); }

void set_find_caller(FindCaller find) { find_caller.store(find, std::memory_order_relaxed); }

Label::Label(std::string_view text) noexcept : text_(text), outer_(std::exchange(innermost, this)) {}

Label::~Label() { innermost = outer_; }

Text current_purpose() {
  if (innermost == nullptr) {
    return module_now;
  }
  std::string purpose;
  const auto put_before = [&](std::string_view text) {
    if (!text.empty()) {
      purpose.insert(0, purpose.empty() ? "" : " / ").insert(0, text);
    }
  };
  for (const auto* label = innermost; label != nullptr; label = label->outer_) {
    put_before(label->text_);
  }
  if (module_now != nullptr) {
    put_before(*module_now);
  }
  return purpose.empty() ? nullptr : std::make_shared<const std::string>(std::move(purpose));
}

Text current_module() { return module_now; }

Text set_current_module(Text module) { return std::exchange(module_now, std::move(module)); }

bool purposes_are_wanted() noexcept { return callers_are_recorded() || at::hasCallbacks(); }

NamedWorks::NamedWorks() {
  if (!purposes_are_wanted()) {
    return;
  }
  const auto purpose = current_purpose();
  if (purpose == nullptr) {
    return;
  }
  before_ = std::make_unique<std::string>(compat::work_name());
  compat::set_work_name(before_->empty() ? *purpose : *before_ + " / " + *purpose);
}

NamedWorks::~NamedWorks() {
  if (before_ != nullptr) {
    compat::set_work_name(*before_);
  }
}

}  // namespace funcol
