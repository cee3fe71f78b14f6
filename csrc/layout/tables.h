// The tables in which the process remembers decisions, plans and specs, each bounded by bytes.
//
// A table is one cache or several that share a limit. All tables together take at most 248 MiB by default.
// Not thread-safe: the GIL is the lock of the tables here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace funcol {

class CacheBase;

// A table's limit and the bytes that its caches take together.
struct Table {
  size_t limit = 0;
  size_t bytes = 0;
  std::vector<CacheBase*> caches = {};
};

// A cache as its table sees it.
class CacheBase {
 public:
  explicit CacheBase(Table& table);
  virtual ~CacheBase();
  CacheBase(const CacheBase&) = delete;
  CacheBase& operator=(const CacheBase&) = delete;

  virtual size_t size() const = 0;

  // The functions below remove entries and return them. The caller destroys them once all caches are
  // consistent, since a destructor may call any cache.
  using Removed = std::shared_ptr<void>;
  virtual Removed remove_all() = 0;
  virtual Removed remove_mesh(uint64_t mesh_id) = 0;
  // Removes entries at random until `bytes` more bytes fit.
  virtual Removed make_room(size_t bytes) = 0;

 protected:
  Table& table() const { return table_; }

 private:
  Table& table_;
};

// Returns the table of this name. Throws std::out_of_range for an unknown name. tables.cpp lists the names.
Table& find_table(const std::string& name);

// Returns the tables by name.
const std::map<std::string, Table>& tables();

// Returns the number of entries of each table, by name.
std::map<std::string, size_t> table_sizes();

// Limits a table to `bytes`, and removes random entries until it fits.
void set_table_limit(Table& table, size_t bytes);

void clear_table(Table& table);
void clear_tables();

// Removes the entries whose keys name a mesh, by its id.
void forget_mesh(uint64_t mesh_id);

// Returns a new mesh id. Unlike an address, an id is never reused.
uint64_t new_mesh_id();

}  // namespace funcol
