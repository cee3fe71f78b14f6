// A pool of searches for redistribution costs on one mesh under one cost model, kept between calls: the
// activations of a model have the same shapes and layouts in every iteration.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "layout/cache.h"
#include "planner/shortest_paths.h"

namespace funcol {

// Returns the target placements of a search in canonical form: sorted, without duplicates, without Replicate
// and masked placements. Callers with the same targets then share one search.
std::vector<Placement> vocabulary_of(std::vector<Placement> placements);

// The searches of one mesh and cost model. Thread-safe.
class SearchPool {
 public:
  // Uses default_alpha_beta(mesh) if `model` is nullopt. Throws std::invalid_argument if the model has a
  // different number of axes.
  explicit SearchPool(Mesh mesh, const std::optional<CostModel>& model = std::nullopt,
                      size_t max_idle = kMaxIdle);

  const Mesh& mesh() const { return mesh_; }

  // Returns the search from `source`, with the results of earlier callers. The caller owns it until
  // give_back(); until then other callers get a new search. `vocabulary` comes from vocabulary_of().
  std::unique_ptr<ShortestPaths> take(const std::vector<int64_t>& shape, int64_t itemsize,
                                      const Layout& source, std::vector<Placement> vocabulary);
  void give_back(std::unique_ptr<ShortestPaths> paths);

  size_t num_idle() const;

 private:
  static constexpr size_t kMaxIdle = 512;

  struct Key {
    std::vector<int64_t> shape;
    int64_t itemsize;
    Layout source;
    std::vector<Placement> vocabulary;

    size_t hash() const;
    size_t heap_bytes() const { return 0; }
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct IdleSearch {
    std::unique_ptr<ShortestPaths> paths;

    size_t heap_bytes() const { return 0; }
  };

  const Mesh mesh_;
  const Costs costs_;
  mutable std::mutex mutex_;
  Table table_{SIZE_MAX};  // bounded by the number of searches: they grow with use
  Cache<Key, IdleSearch> idle_;
};

}  // namespace funcol
