#include "planner/search_pool.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "layout/hash.h"

namespace funcol {
std::vector<Placement> vocabulary_of(std::vector<Placement> placements) {
  std::erase_if(placements,
                [](const auto& placement) { return placement.is_replicate() || placement.mask != 0; });
  const auto key = [](const Placement& placement) {
    return std::tie(placement.kind, placement.op, placement.dim, placement.split_factor);
  };
  std::ranges::sort(placements, {}, key);
  std::vector<Placement> vocabulary;
  vocabulary.reserve(placements.size());
  for (const auto& placement : placements) {
    if (vocabulary.empty() || vocabulary.back() != placement) {
      vocabulary.push_back(placement);
    }
  }
  return vocabulary;
}

size_t SearchPool::Key::hash() const {
  Hash hash;
  hash.add_all(shape);
  hash.add(itemsize);
  hash.add(source);
  for (const auto& placement : vocabulary) {
    hash.add(placement);
  }
  return hash.value();
}

SearchPool::SearchPool(Mesh mesh, const std::optional<CostModel>& model, size_t max_idle)
    : mesh_(std::move(mesh)),
      costs_(model.has_value() ? *model : CostModel(default_alpha_beta(mesh_)), mesh_),
      idle_(table_, max_idle) {}

std::unique_ptr<ShortestPaths> SearchPool::take(const std::vector<int64_t>& shape, int64_t itemsize,
                                                const Layout& source, std::vector<Placement> vocabulary) {
  Key key{shape, itemsize, source, std::move(vocabulary)};
  {
    const std::scoped_lock lock(mutex_);
    if (auto idle = idle_.extract(key)) {
      return std::move(idle->paths);
    }
  }
  return std::make_unique<ShortestPaths>(mesh_, costs_, std::move(key.shape), itemsize, std::move(key.source),
                                         std::move(key.vocabulary));
}

void SearchPool::give_back(std::unique_ptr<ShortestPaths> paths) {
  Key key{paths->shape(), paths->itemsize(), paths->source(), paths->vocabulary()};
  const std::scoped_lock lock(mutex_);
  idle_.insert_if_admitted(std::move(key), {std::move(paths)});
}

size_t SearchPool::num_idle() const {
  const std::scoped_lock lock(mutex_);
  return idle_.size();
}

}  // namespace funcol
