// Plans of moves between meshes of many ranks: the messages that are made, and the memory, which is counted
// here.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "planner/mesh_change.h"
#include "planner/mesh_changes.h"

namespace funcol::large_world_test {
namespace {

std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> most_bytes{0};

// The most bytes that `make` holds at a time.
int64_t bytes_of(const std::function<void()>& make) {
  const int64_t before = live_bytes;
  most_bytes = before;
  make();
  return most_bytes - before;
}

void count(int64_t bytes) {
  live_bytes += bytes;
  most_bytes = std::max<int64_t>(most_bytes, live_bytes);
}

struct LargeWorld {
  const char* name;
  // For a root r of the number of ranks n.
  MeshChangeTask (*task)(int64_t n, int64_t r);
  int64_t (*num_messages)(int64_t n, int64_t r);  // of a rank, at most
};

void PrintTo(const LargeWorld& world, std::ostream* out) { *out << world.name; }

std::string name_of(const ::testing::TestParamInfo<LargeWorld>& info) { return info.param.name; }

using test::change_of;
using test::ranked;

const std::vector<LargeWorld> kWorlds{
    {"SameCuts",
     [](int64_t n, int64_t) {
       return change_of(ranked({n}), {"S0"}, ranked({n}, n), {"S0"}, {n, 4});
     },
     [](int64_t, int64_t) { return int64_t{1}; }},
    {"RowsToColumns",
     [](int64_t n, int64_t) {
       return change_of(ranked({n}), {"S0"}, ranked({n}, n), {"S1"}, {n, n});
     },
     [](int64_t n, int64_t) { return n; }},
    {"BlocksToBlocks",
     [](int64_t n, int64_t r) {
       return change_of(ranked({r, r}), {"S0,S1"}, ranked({r, r}, n), {"S1,S0"}, {n, n});
     },
     [](int64_t, int64_t) { return int64_t{1}; }},
    {"ReplicasToColumns",
     [](int64_t n, int64_t r) {
       return change_of(ranked({r, r}), {"R,S0"}, ranked({n}, n), {"S1"}, {n, n});
     },
     [](int64_t, int64_t r) { return r; }},
    {"ReplicasToReplicas",
     [](int64_t n, int64_t) { return change_of(ranked({n}), {"R"}, ranked({n}, n), {"R"}, {n}); },
     [](int64_t, int64_t) { return int64_t{1}; }},
    {"OverlappingReplicas",
     [](int64_t n, int64_t r) {
       return change_of(ranked({r, r}), {"R,S0"}, ranked({r, r}, n / 2), {"S0,R"}, {n, 3});
     },
     [](int64_t, int64_t) { return int64_t{4}; }},
    {"UnevenOnTheSameRanks",
     [](int64_t n, int64_t r) {
       return change_of(ranked({4, n / 4}), {"R,S1"}, ranked({r, r}, 0), {"S1,S0"}, {n + 1, 2 * n + 3});
     },
     [](int64_t, int64_t r) { return r; }},
    {"ReducedFirst",
     [](int64_t n, int64_t r) {
       return change_of(ranked({r, r}), {"P,S0"}, ranked({n}, n), {"S0"}, {n, n});
     },
     [](int64_t, int64_t) { return int64_t{2}; }},
};

class LargeWorlds : public ::testing::TestWithParam<LargeWorld> {};

MeshChange planned(const MeshChangeTask& task) {
  return plan_mesh_change(task,
                          {default_alpha_beta(task.src_mesh.mesh), default_alpha_beta(task.dst_mesh.mesh)});
}

TEST_P(LargeWorlds, ARankMakesItsOwnMessages) {
  constexpr int64_t kRoot = 256;
  constexpr int64_t kRanks = kRoot * kRoot;
  const auto change = planned(GetParam().task(kRanks, kRoot));
  ASSERT_TRUE(change.transfer.has_value());
  const auto ranks = all_ranks(change.task);
  int64_t num_sent = 0;
  for (const size_t place : {size_t{0}, ranks.size() / 3, ranks.size() - 1}) {
    const auto messages = messages_of(change.transfer->task, ranks[place]);
    EXPECT_LE(std::ssize(messages.sent), GetParam().num_messages(kRanks, kRoot)) << ranks[place];
    num_sent += std::ssize(messages.sent);
  }
  EXPECT_GT(num_sent, 0);
}

TEST_P(LargeWorlds, ARankPlansInAHundredMegabytes) {
  constexpr int64_t kRoot = 256;
  constexpr int64_t kRanks = kRoot * kRoot;
  const auto task = GetParam().task(kRanks, kRoot);
  const auto bytes = bytes_of([&] {
    const auto change = planned(task);
    messages_of(change.transfer->task, task.dst_mesh.ranks.back());
  });
  EXPECT_GT(bytes, kRanks);  // it is counted
  EXPECT_LE(bytes, 100'000'000);
}

TEST_P(LargeWorlds, TakeFourTimesTheMemoryForFourTimesTheRanks) {
  const auto bytes = [&](int64_t root) {
    const auto task = GetParam().task(root * root, root);
    return bytes_of([&] {
      const auto change = planned(task);
      messages_of(change.transfer->task, task.dst_mesh.ranks.back());
    });
  };
  EXPECT_LE(bytes(128), 5 * bytes(64));
}

INSTANTIATE_TEST_SUITE_P(Kinds, LargeWorlds, ::testing::ValuesIn(kWorlds), name_of);

}  // namespace
}  // namespace funcol::large_world_test

void* operator new(size_t size) {
  void* const memory = std::malloc(size);  // NOLINT
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  funcol::large_world_test::count(static_cast<int64_t>(malloc_usable_size(memory)));
  return memory;
}

void* operator new(size_t size, const std::nothrow_t& /*tag*/) noexcept {
  void* const memory = std::malloc(size);  // NOLINT
  if (memory != nullptr) {
    funcol::large_world_test::count(static_cast<int64_t>(malloc_usable_size(memory)));
  }
  return memory;
}

void operator delete(void* memory) noexcept {
  if (memory != nullptr) {
    funcol::large_world_test::count(-static_cast<int64_t>(malloc_usable_size(memory)));
  }
  std::free(memory);  // NOLINT
}

void operator delete(void* memory, size_t /*size*/) noexcept { operator delete(memory); }
