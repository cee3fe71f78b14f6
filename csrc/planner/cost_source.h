// Costs of redistributions on one mesh under one cost model, remembered between calls: the same activations
// come again and again in a model.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "planner/lru_cache.h"
#include "planner/reach.h"

namespace funcol {

// The placements that a search has to be told of, each once and in one order, so that those who ask for the
// same share what is known.
std::vector<Placement> vocabulary_of(std::vector<Placement> placements);

// Safe against several threads.
class CostSource {
 public:
  // Priced by default_alpha_beta(mesh) if no model is given. Throws std::invalid_argument if the model knows
  // another number of axes.
  explicit CostSource(Mesh mesh, const std::optional<CostModel>& model = std::nullopt,
                      size_t num_kept = kNumKept);

  const Mesh& mesh() const { return mesh_; }

  // What was found out so far about redistributions of such a tensor. It is the caller's alone until it is
  // given back; who asks for it meanwhile gets one that begins anew. `vocabulary` is one of vocabulary_of().
  std::unique_ptr<Reach> take(const std::vector<int64_t>& shape, int64_t itemsize, const Layout& source,
                              std::vector<Placement> vocabulary);
  void give_back(std::unique_ptr<Reach> reach);

  size_t num_kept() const;

 private:
  static constexpr size_t kNumKept = 512;

  struct Key {
    std::vector<int64_t> shape;
    int64_t itemsize;
    Layout source;
    std::vector<Placement> vocabulary;

    friend bool operator==(const Key&, const Key&) = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };

  const Mesh mesh_;
  const Costs costs_;
  mutable std::mutex mutex_;
  LruCache<Key, std::unique_ptr<Reach>, KeyHash> kept_;
};

}  // namespace funcol
