#include "async/unwaited.h"

#include <pthread.h>

namespace funcol {
namespace {

struct Count {
  std::string op;
  std::atomic<int64_t> value{0};
  Count* next = nullptr;
};

// A list that only grows, at its head, so that it can be read without a lock, at exit and after a fork too.
std::atomic<Count*> counts{nullptr};
std::atomic<uint64_t> forks{0};

Count* find(Count* first, std::string_view op) {
  while (first != nullptr && first->op != op) {
    first = first->next;
  }
  return first;
}

void start_anew_in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  for (auto* count = counts.load(std::memory_order_acquire); count != nullptr; count = count->next) {
    count->value.store(0, std::memory_order_relaxed);
  }
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, start_anew_in_child);

}  // namespace

std::atomic<int64_t>& unwaited_count(std::string_view op) {
  auto* head = counts.load(std::memory_order_acquire);
  if (auto* known = find(head, op)) {
    return known->value;
  }
  auto* fresh = new Count{std::string(op)};  // NOLINT(cppcoreguidelines-owning-memory)
  fresh->next = head;
  while (!counts.compare_exchange_weak(fresh->next, fresh)) {
    if (auto* known = find(fresh->next, op)) {
      delete fresh;  // NOLINT(cppcoreguidelines-owning-memory): another thread was first
      return known->value;
    }
  }
  return fresh->value;
}

std::map<std::string, int64_t> unwaited_collectives() {
  std::map<std::string, int64_t> result;
  for (auto* count = counts.load(std::memory_order_acquire); count != nullptr; count = count->next) {
    if (const auto value = count->value.load(std::memory_order_relaxed); value != 0) {
      result.emplace(count->op, value);
    }
  }
  return result;
}

uint64_t num_forks() noexcept { return forks.load(std::memory_order_relaxed); }

}  // namespace funcol
