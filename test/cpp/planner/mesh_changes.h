// Moves between meshes to plan: from a text, or at random.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "layout/naive_shards.h"
#include "planner/tasks.h"
#include "planner/transfer.h"

namespace funcol::test {

// A mesh of the ranks first, first + 1, ...
inline RankedMesh ranked(std::vector<int64_t> sizes, int64_t first = 0, std::vector<AxisSet> merged = {}) {
  RankedMesh mesh{{std::move(sizes), {}, std::move(merged)}, {}};
  mesh.ranks.resize(mesh.mesh.num_ranks());
  std::iota(mesh.ranks.begin(), mesh.ranks.end(), first);
  return mesh;
}

inline MeshChangeTask change_of(RankedMesh src_mesh, const Sides& src, RankedMesh dst_mesh, const Sides& dst,
                                const std::vector<int64_t>& shape, int64_t itemsize = 4) {
  auto src_layout = layout_of(src, src_mesh.mesh, shape.size());
  auto dst_layout = layout_of(dst, dst_mesh.mesh, shape.size());
  return {std::move(src_mesh),
          std::move(src_layout),
          std::move(dst_mesh),
          std::move(dst_layout),
          shape,
          itemsize};
}

// A random move of up to `most_ranks` ranks on each side, out of a world of twice as many.
class RandomChange {
 public:
  RandomChange(uint32_t seed, RandomLimits limits, int64_t most_ranks, bool has_partials = false)
      : random_(seed), limits_(std::move(limits)), most_ranks_(most_ranks), has_partials_(has_partials) {}

  MeshChangeTask make() {
    const auto src = side();
    limits_.min_dims = limits_.max_dims = static_cast<int64_t>(src.shape.size());
    const auto dst = side();
    return {with_ranks(src.mesh), placed(src.src), with_ranks(dst.mesh),
            placed(dst.src),      src.shape,       src.itemsize};
  }

 private:
  Redistribution side() {
    while (true) {
      auto task = RandomTask(static_cast<uint32_t>(random_()), limits_).make();
      if (task.mesh.num_ranks() <= most_ranks_) {
        return task;
      }
    }
  }

  RankedMesh with_ranks(const Mesh& mesh) {
    std::vector<int64_t> ranks(2 * most_ranks_);
    std::iota(ranks.begin(), ranks.end(), 0);
    for (size_t i = ranks.size(); i > 1 && random_() % 2 == 0; --i) {
      std::swap(ranks[i - 1], ranks[random_() % i]);
    }
    const auto first = static_cast<std::ptrdiff_t>(random_() % static_cast<uint64_t>(most_ranks_));
    return {mesh, {ranks.begin() + first, ranks.begin() + first + mesh.num_ranks()}};
  }

  Layout placed(Layout layout) const {
    for (auto& placement : layout.placements) {
      placement = placement.is_partial() && !has_partials_ ? Placement::replicate() : placement;
    }
    return layout;
  }

  std::mt19937 random_;
  RandomLimits limits_;
  int64_t most_ranks_;
  bool has_partials_;
};

// The elements of a message, in their order.
inline Indices elements_of(const TransferMessage& message, const std::vector<int64_t>& shape) {
  std::vector<Indices> indices;
  indices.reserve(message.indices.size());
  for (const auto& of_dim : message.indices) {
    indices.push_back(listed(of_dim));
  }
  const auto box = elements_at(indices, shape);
  return {box.begin() + message.begin, box.begin() + message.begin + message.size};
}

inline std::string described(const MeshChangeTask& task) {
  const auto text_of = [](const RankedMesh& mesh, const Layout& layout) {
    std::string text = to_string(layout) + " on";
    for (const int64_t size : mesh.mesh.sizes) {
      text += " " + std::to_string(size);
    }
    text += " of ranks";
    for (const int64_t rank : mesh.ranks) {
      text += " " + std::to_string(rank);
    }
    return text;
  };
  std::string text = text_of(task.src_mesh, task.src) + " -> " + text_of(task.dst_mesh, task.dst) + ", shape";
  for (const int64_t size : task.shape) {
    text += " " + std::to_string(size);
  }
  return text;
}

}  // namespace funcol::test
