#include "dtensor/targets.h"

#include <utility>

#include "planner/lru_cache.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/specs.h"

namespace funcol::python {
namespace {

constexpr size_t kNumTargets = 1024;

struct TargetKeyHash {
  size_t operator()(const TargetKey& key) const { return ExecutionKeyHash()(key.key); }
};

// Never destroyed: it holds Python's objects.
LruCache<TargetKey, Target, TargetKeyHash>& targets() {
  static auto* const cache = new LruCache<TargetKey, Target, TargetKeyHash>(kNumTargets);  // NOLINT
  return *cache;
}

}  // namespace

Target find_target(TargetKey key, py::handle src_spec, py::handle device_mesh, KnownMesh& known,
                   py::handle placements) {
  auto& cache = targets();
  if (const auto* target = cache.get(key)) {
    return {target->execution, copy_onto(target->spec, device_mesh)};
  }
  const py::object spec =
      callback(Callback::kRedistributionTarget)(src_spec, device_mesh, placements, py::none(), py::none());
  auto planned = key.key;
  planned.dst = SpecObjects(spec).read();
  auto execution = execution_of(std::move(planned), device_mesh, known);  // ValueError for illegal specs
  cache.put(std::move(key), {execution, copy_without_mesh(spec)});
  return {std::move(execution), spec};
}

void forget_targets() { targets().clear(); }

}  // namespace funcol::python
