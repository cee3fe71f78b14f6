#include "comm/call_site.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <iomanip>
#include <sstream>
#include <typeinfo>
#include <utility>

#include "compat/work_names.h"

namespace funcol {
namespace {

std::atomic<bool> records_callers{false};

bool callers_are_recorded() noexcept { return records_callers.load(std::memory_order_relaxed); }

Text find_none() { return nullptr; }
std::atomic<FindCaller> find_caller{find_none};

thread_local const Label* innermost = nullptr;
thread_local Text module_now;

// Reads the coarse clock, which takes a quarter of the time of std::chrono's.
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

InFlight::InFlight(std::string_view op, GroupRef group, at::TensorList outputs, CallSite started)
    : op(op), group(std::move(group)), started(std::move(started)) {
  shapes.reserve(outputs.size());
  for (const auto& output : outputs) {
    if (!output.defined()) {
      continue;
    }
    shapes.push_back(output.sizes().vec());
    is_on_cpu &= output.is_cpu();
    if (!dtype.has_value()) {
      dtype = output.scalar_type();
    }
  }
}

std::string own_rank_text(const GroupRef& ref) {
  const auto group = ref.lock();
  if (!group || typeid(*group) != typeid(c10d::ProcessGroup)) {
    return {};
  }
  try {
    return c10::str(" (rank ", group->getRank(), " of ", group->getSize(), ")");
  } catch (const c10::Error&) {  // its backend is gone
    return {};
  }
}

std::string InFlight::text() const {
  std::ostringstream text;
  text << op << " of " << (dtype.has_value() ? c10::toString(*dtype) : "no tensors");
  for (size_t i = 0; i < shapes.size(); ++i) {
    text << (i == 0 ? " " : ", ") << at::IntArrayRef(shapes[i]);
  }
  text << " on group '" << group.name() << "'" << own_rank_text(group) << " for " << std::fixed
       << std::setprecision(1) << started.seconds() << " s";
  if (started.caller != nullptr) {
    text << ", started at " << *started.caller;
  }
  if (started.purpose != nullptr) {
    text << ", for " << *started.purpose;
  }
  return text.str();
}

void record_callers(bool enabled) { records_callers.store(enabled, std::memory_order_relaxed); }

void set_find_caller(FindCaller find) { find_caller.store(find, std::memory_order_relaxed); }

Label::Label(std::string_view text) noexcept : text_(text), outer_(std::exchange(innermost, this)) {}

Label::~Label() { innermost = outer_; }

Text current_purpose() {
  if (innermost == nullptr) {
    return module_now;
  }
  std::string purpose;
  const auto prepend = [&](std::string_view text) {
    if (!text.empty()) {
      purpose.insert(0, purpose.empty() ? "" : " / ").insert(0, text);
    }
  };
  for (const auto* label = innermost; label != nullptr; label = label->outer_) {
    prepend(label->text_);
  }
  if (module_now != nullptr) {
    prepend(*module_now);
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
