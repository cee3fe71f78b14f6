#include "planner/cost_source.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "layout/hash.h"

namespace funcol {
namespace {

void add(const std::vector<Placement>& placements, Hash& hash) {
  hash.add(placements.size());
  for (const auto& placement : placements) {
    hash.add(static_cast<uint64_t>(placement.kind) << 8 | static_cast<uint64_t>(placement.op) |
             static_cast<uint64_t>(placement.dim) << 16 |
             static_cast<uint64_t>(placement.split_factor) << 32);
    hash.add(placement.mask);
  }
}

}  // namespace

std::vector<Placement> vocabulary_of(std::vector<Placement> placements) {
  std::erase_if(placements,
                [](const auto& placement) { return placement.is_replicate() || placement.mask != 0; });
  const auto key = [](const Placement& placement) {
    return std::tie(placement.kind, placement.op, placement.dim, placement.split_factor);
  };
  std::ranges::sort(placements, {}, key);
  const auto repeated = std::ranges::unique(placements);
  placements.erase(repeated.begin(), repeated.end());
  return placements;
}

size_t CostSource::KeyHash::operator()(const Key& key) const {
  Hash hash;
  hash.add_all(key.shape);
  hash.add(key.itemsize);
  add(key.source.placements, hash);
  for (const auto& axes : key.source.order) {
    hash.add_all(axes);
  }
  add(key.vocabulary, hash);
  return hash.value();
}

CostSource::CostSource(Mesh mesh, const std::optional<CostModel>& model, size_t num_kept)
    : mesh_(std::move(mesh)),
      costs_(model.has_value() ? *model : CostModel(default_alpha_beta(mesh_)), mesh_),
      kept_(num_kept) {}

std::unique_ptr<Reach> CostSource::take(const std::vector<int64_t>& shape, int64_t itemsize,
                                        const Layout& source, std::vector<Placement> vocabulary) {
  Key key{shape, itemsize, source, std::move(vocabulary)};
  {
    const std::scoped_lock lock(mutex_);
    if (auto kept = kept_.take(key)) {
      return std::move(*kept);
    }
  }
  return std::make_unique<Reach>(mesh_, costs_, std::move(key.shape), itemsize, std::move(key.source),
                                 std::move(key.vocabulary));
}

void CostSource::give_back(std::unique_ptr<Reach> reach) {
  Key key{reach->shape(), reach->itemsize(), reach->source(), reach->vocabulary()};
  const std::scoped_lock lock(mutex_);
  kept_.put(std::move(key), std::move(reach));
}

size_t CostSource::num_kept() const {
  const std::scoped_lock lock(mutex_);
  return kept_.size();
}

}  // namespace funcol
