#include "layout/tables.h"

#include <algorithm>
#include <utility>

namespace funcol {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Returns the tables. Limits follow what a training program with many shapes fills: 248 MiB in all.
std::map<std::string, Table>& all_tables() {
  static auto* const tables = new std::map<std::string, Table>{
      // NOLINT: outlives Python
      {"calls", {60 * kMiB}},      {"checked_types", {8 * kMiB}}, {"composite_gradients", {24 * kMiB}},
      {"composites", {40 * kMiB}}, {"decisions", {8 * kMiB}},     {"pointwise_dtypes", {kMiB}},
      {"mesh_pairs", {kMiB}},      {"rules", {3 * kMiB}},         {"specs", {64 * kMiB}},
      {"transfers", {39 * kMiB}},
  };
  return *tables;
}

// Calls remove(cache) for the caches of a table. Returns the removed entries.
template <typename Remove>
std::vector<CacheBase::Removed> remove_from(const Table& table, const Remove& remove) {
  std::vector<CacheBase::Removed> removed;
  removed.reserve(table.caches.size());
  for (auto* const cache : table.caches) {
    removed.push_back(remove(*cache));
  }
  return removed;
}

template <typename Remove>
std::vector<std::vector<CacheBase::Removed>> remove_from_all(const Remove& remove) {
  std::vector<std::vector<CacheBase::Removed>> removed;
  for (const auto& [name, table] : all_tables()) {
    removed.push_back(remove_from(table, remove));
  }
  return removed;
}

}  // namespace

CacheBase::CacheBase(Table& table) : table_(table) { table.caches.push_back(this); }

CacheBase::~CacheBase() { std::erase(table_.caches, this); }

Table& find_table(const std::string& name) { return all_tables().at(name); }

const std::map<std::string, Table>& tables() { return all_tables(); }

std::map<std::string, size_t> table_sizes() {
  std::map<std::string, size_t> sizes;
  for (const auto& [name, table] : all_tables()) {
    sizes[name] = 0;
    for (const auto* const cache : table.caches) {
      sizes[name] += cache->size();
    }
  }
  return sizes;
}

void set_table_limit(Table& table, size_t bytes) {
  table.limit = bytes;
  const auto removed = remove_from(table, [](CacheBase& cache) { return cache.make_room(0); });
}

void clear_table(Table& table) {
  const auto removed = remove_from(table, [](CacheBase& cache) { return cache.remove_all(); });
}

void clear_tables() {
  const auto removed = remove_from_all([](CacheBase& cache) { return cache.remove_all(); });
}

void forget_mesh(uint64_t mesh_id) {
  const auto removed = remove_from_all([&](CacheBase& cache) { return cache.remove_mesh(mesh_id); });
}

uint64_t new_mesh_id() {
  static uint64_t last = 0;
  return ++last;
}

}  // namespace funcol
