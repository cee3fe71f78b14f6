#include "redistribute/plan_cache.h"

#include <mutex>
#include <utility>

#include "layout/hash.h"
#include "planner/lru_cache.h"

namespace funcol {
namespace {

constexpr size_t kCapacity = 1024;

struct Key {
  Mesh mesh;
  std::vector<int64_t> shape;
  int64_t itemsize;
  Layout src;
  Layout dst;
  std::optional<CostModel> model;
  std::optional<int64_t> max_bytes;

  friend bool operator==(const Key&, const Key&) = default;
};

// Cost models are few: they are left to the comparison.
struct KeyHash {
  size_t operator()(const Key& key) const {
    Hash hash;
    hash.add_all(key.mesh.sizes);
    hash.add_all(key.mesh.merged);
    hash.add_all(key.shape);
    hash.add(key.itemsize);
    hash.add(key.src);
    hash.add(key.dst);
    hash.add(key.max_bytes.value_or(-1));
    return hash.value();
  }
};

struct Cache {
  std::mutex mutex;
  LruCache<Key, std::shared_ptr<const Plan>, KeyHash> plans{kCapacity};
};

Cache& cache() {
  static Cache* const instance = new Cache;  // NOLINT: outlives every thread that may plan
  return *instance;
}

}  // namespace

std::shared_ptr<const Plan> cached_plan(const Redistribution& task, const std::optional<CostModel>& model,
                                        std::optional<int64_t> max_bytes) {
  auto& [mutex, plans] = cache();
  Key key{task.mesh, task.shape, task.itemsize, task.src, task.dst, model, max_bytes};
  {
    const std::scoped_lock lock(mutex);
    if (const auto* plan = plans.get(key)) {
      return *plan;
    }
  }
  auto plan = std::make_shared<const Plan>(plan_redistribution(
      task, model.has_value() ? *model : CostModel(default_alpha_beta(task.mesh)), max_bytes));
  const std::scoped_lock lock(mutex);
  plans.put(std::move(key), plan);
  return plan;
}

size_t num_cached_plans() {
  auto& [mutex, plans] = cache();
  const std::scoped_lock lock(mutex);
  return plans.size();
}

void forget_plans() {
  auto& [mutex, plans] = cache();
  const std::scoped_lock lock(mutex);
  plans.clear();
}

}  // namespace funcol
