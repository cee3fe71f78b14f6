// Texts of placements, the layouts that they make, and the shards of these layouts. Texts are refused or
// read; what is read is written as it was meant, and cuts every dim as PyTorch's chunks do.
#include <algorithm>
#include <stdexcept>

#include "bytes.h"
#include "failure.h"
#include "fuzz_target.h"
#include "layout/naive_shards.h"

namespace funcol::test {
namespace {

// The most pieces of a dim that the slow reference writes out.
constexpr int64_t kMaxPieces = 64;

std::string written(const std::vector<Placement>& placements) {
  std::string text;
  for (const auto& placement : placements) {
    text += (text.empty() ? "" : ", ") + to_string(placement);
  }
  return text;
}

void check_text(const std::vector<Placement>& placements, const std::string& text) {
  const std::string once = written(placements);
  if (parse_placements(once) != placements) {
    fail("'" + text + "' is written as '" + once + "', which means something else");
  }
}

void check_cuts(const Layout& layout, const Mesh& mesh, int64_t dim, int64_t size) {
  bool is_even = true;
  bool is_empty_somewhere = false;
  int64_t first = -1;
  for (const auto& coordinate : coordinates(mesh)) {
    const Indices held = listed(local_indices(layout, mesh, dim, size, coordinate));
    if (held != naive_local_indices(layout, mesh, dim, size, coordinate)) {
      fail("rank " + joined(coordinate) + " holds other indices of dim " + std::to_string(dim) + " of " +
           std::to_string(size) + " under " + to_string(layout));
    }
    const auto length = static_cast<int64_t>(held.size());
    first = first < 0 ? length : first;
    is_even = is_even && length == first;
    is_empty_somewhere = is_empty_somewhere || length == 0;
  }
  if (is_cut_evenly(layout, mesh, dim, size) && !is_even) {
    fail(to_string(layout) + " does not cut " + std::to_string(size) + " evenly");
  }
  if (!layout.axes_of(dim).empty() && leaves_none_empty(layout, mesh, dim, size) == is_empty_somewhere) {
    fail(to_string(layout) + " on " + joined(mesh.sizes) + ", dim of " + std::to_string(size) +
         ": whether a shard is empty is told wrongly");
  }
}

void check_layout(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape) {
  const Layout plain = without_strided_shards(layout, mesh, shape);
  for (const auto& coordinate : coordinates(mesh)) {
    const auto local = local_shape(layout, mesh, shape, coordinate);
    if (local != local_shape(plain, mesh, shape, coordinate)) {
      fail(to_string(layout) + " is not " + to_string(plain));
    }
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      const auto at = static_cast<int64_t>(dim);
      if (local_indices(layout, mesh, at, shape[dim], coordinate) !=
          local_indices(plain, mesh, at, shape[dim], coordinate)) {
        fail(to_string(layout) + " is not " + to_string(plain) + " on " + joined(mesh.sizes));
      }
    }
  }
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const auto at = static_cast<int64_t>(dim);
    int64_t most_pieces = 1;
    for (const int64_t axis : layout.axes_of(at)) {
      most_pieces = std::max(most_pieces, layout.placements[axis].split_factor);
    }
    if (most_pieces <= kMaxPieces) {
      check_cuts(layout, mesh, at, shape[dim]);
    }
  }
}

}  // namespace

void run(Bytes& bytes) {
  const Mesh mesh = mesh_from(bytes, 4, 24);
  const int64_t num_dims = bytes.below(4);
  const auto shape = shape_from(bytes, num_dims, 4096);
  const bool shuffles = bytes.coin();
  Bytes order_bytes = bytes;
  for (int i = 0; shuffles && i < 4; ++i) {
    bytes.below(256);
  }
  const std::string text = bytes.rest();
  try {
    const auto placements = parse_placements(text);
    check_text(placements, text);
    auto order = ShardOrder();
    if (shuffles && std::ranges::all_of(placements, [](const auto& placement) {
          return placement.dim >= 0 && placement.dim < 4;
        })) {
      order = order_from(order_bytes, placements);
    }
    check_layout(make_layout("layout_fuzz", placements, order, mesh, num_dims), mesh, shape);
  } catch (const std::invalid_argument& error) {
    if (std::string(error.what()).empty()) {
      fail("'" + text + "' is refused without a reason");
    }
  }
}

}  // namespace funcol::test
