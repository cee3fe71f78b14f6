// How many collectives nobody has waited for, by op.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace funcol {

// The count of `op`: of its collectives whose results are still pending, or were dropped unused. It lives for
// ever. Finding it takes no lock and compares names, of which there are few.
std::atomic<int64_t>& unwaited_count(std::string_view op);

// The counts that are not zero. A child process starts with none: the collectives are its parent's.
std::map<std::string, int64_t> unwaited_collectives();

// How often this process and its parents forked: differs from its value before in a child alone.
uint64_t num_forks() noexcept;

}  // namespace funcol
