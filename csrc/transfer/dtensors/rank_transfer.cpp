#include "transfer/dtensors/rank_transfer.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "comm/process_group.h"
#include "layout/tensor_meta.h"
#include "pyobjects/attributes.h"
#include "transfer/op_names.h"
#include "transfer/transfer_exchange.h"

namespace funcol::python {
namespace {

bool is_from_owner(const TransferKey& key) { return key.src.placements.empty(); }

// Returns the layout of the tensor once its partials are reduced.
Layout reduced(Layout layout) {
  for (auto& placement : layout.placements) {
    placement = placement.is_partial() ? Placement::replicate() : placement;
  }
  return layout;
}

Layout replicated(const Mesh& mesh) { return {std::vector<Placement>(mesh.sizes.size()), {}}; }

// Returns the layout of the shards.
Layout layout_of(const TransferKey& key, const Mesh& mesh) {
  return checked_layout("funcol::redistribute", is_from_owner(key) ? key.dst : key.src, mesh, key.shape);
}

// Returns the axes along whose group the tensor moves, none if no rank sends. Sets `is_p2p` if no group has
// just these ranks.
AxisSet axes_of_move(const TransferKey& key, const Layout& layout, const Mesh& mesh, bool& is_p2p) {
  AxisSet cutting = 0;
  AxisSet all = 0;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    all |= mesh.sizes[axis] > 1 ? axis_set(axis) : 0;
    cutting |= mesh.sizes[axis] > 1 && layout.placements[axis].is_shard() ? axis_set(axis) : 0;
  }
  is_p2p = false;
  if (!is_from_owner(key) && !key.handles_all_owners && (cutting == 0 || mesh.has_group(cutting))) {
    return cutting;
  }
  is_p2p = all != 0 && !mesh.has_group(all);
  return all;
}

// Returns the ranks that send their shards to rank `owner`: of those with the same shard, the one that
// agrees with `owner` on the axes that replicate.
RankedMesh senders_to(int64_t owner, const RankedMesh& every, const Layout& layout) {
  const auto& mesh = every.mesh;
  const auto coordinate = mesh.coordinate(owner);
  RankedMesh senders{{mesh.sizes, {}, {}}, {}};
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    if (!layout.placements[axis].is_shard()) {
      senders.mesh.sizes[axis] = 1;
    }
  }
  for (int64_t place = 0; place < senders.mesh.num_ranks(); ++place) {
    auto sender = senders.mesh.coordinate(place);
    for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
      sender[axis] = layout.placements[axis].is_shard() ? sender[axis] : coordinate[axis];
    }
    senders.ranks.push_back(every.ranks[mesh.place(sender)]);
  }
  return senders;
}

TransferProgram make_rank_program(const TransferKey& key, py::handle device_mesh, KnownMesh& known) {
  const auto& mesh = known.mesh;
  TORCH_INTERNAL_ASSERT(known.coordinate.has_value());
  const auto layout = reduced(layout_of(key, mesh));
  TransferProgram program;
  const auto device_type = attribute<"device_type">(device_mesh).cast<std::string>();
  program.bytes = bytes_of_move(key, mesh, device_type == "cpu");
  if (!is_from_owner(key)) {
    const auto dst = key.owner == kEveryRank ? replicated(mesh) : reduced(key.src);
    const TransferKey reduction{key.mesh_id, key.src, dst, key.shape, key.itemsize};
    program.before = find_program(reduction, within_mesh(device_mesh, known))->before;
  }
  bool is_p2p = false;
  const auto axes = key.owner == kEveryRank ? 0 : axes_of_move(key, layout, mesh, is_p2p);
  if (axes == 0) {
    return program;
  }
  TransferGroup group;
  RankedMesh every{mesh, {}};
  if (is_p2p) {
    every.ranks = all_ranks(device_mesh, known);
    group.group = known.world;
    group.has_others = true;
    group.ranks.resize(group_from_ivalue(group.group, kRedistributeMany)->getSize());
    std::iota(group.ranks.begin(), group.ranks.end(), 0);
  } else {
    every.ranks.resize(mesh.num_ranks());
    std::iota(every.ranks.begin(), every.ranks.end(), 0);
    const auto& of_axes = find_group(axes, device_mesh, known);
    group.group = of_axes.group;
    const GroupRanks ranks(mesh, axes, *known.coordinate, of_axes.members);
    for (int64_t rank = 0; rank < ranks.size(); ++rank) {
      group.ranks.push_back(mesh.place(ranks.coordinate(rank)));
    }
  }
  const Mesh alone{{1}, {}, {}};
  const RankedMesh owner{alone, {every.ranks[key.owner]}};
  MeshChangeTask task{
      senders_to(key.owner, every, layout), layout, owner, replicated(alone), key.shape, key.itemsize};
  if (is_from_owner(key)) {
    task = {owner, replicated(alone), every, layout, key.shape, key.itemsize};
  }
  const auto own = every.ranks[mesh.place(*known.coordinate)];
  auto exchange = packed_transfer(plan_transfer(task), group, own, /*keeps_in_buffer=*/true);
  exchange.participants = is_p2p ? c10::str(at::IntArrayRef(every.ranks)) : "";
  exchange.description = c10::str(is_from_owner(key) ? "from" : "to", " rank ", key.owner, ", ",
                                  to_string(layout), " of ", at::IntArrayRef(key.shape));
  program.set_exchange(std::move(exchange));
  return program;
}

}  // namespace

MakeProgram to_or_from_rank(py::handle device_mesh, KnownMesh& known) {
  return [device_mesh, &known](const TransferKey& key) { return make_rank_program(key, device_mesh, known); };
}

int64_t bytes_of_move(const TransferKey& key, const Mesh& mesh, bool is_on_cpu) {
  const auto layout = layout_of(key, mesh);
  const auto longest = num_elements(local_shape(layout, mesh, key.shape, Coordinate(mesh.num_axes(), 0)));
  AxisSet cutting = 0;
  int64_t least = mesh.num_ranks();
  bool is_partial = false;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    is_partial = is_partial || layout.placements[axis].is_partial();
    if (mesh.sizes[axis] > 1 && layout.placements[axis].is_shard()) {
      cutting |= axis_set(axis);
      least = std::min(least, mesh.sizes[axis]);
    }
  }
  int64_t held = key.owner == kEveryRank ? longest * mesh.num_ranks(cutting) : num_elements(key.shape);
  if (key.owner == kEveryRank && cutting != 0 && !mesh.has_group(cutting)) {
    held += held / least;  // it is gathered axis by axis: the tensor before the last gather
  }
  if (cutting == 0 && !is_partial) {
    return 0;
  }
  // gloo gathers and reduces in a buffer of its own.
  const bool is_twice = is_partial || (is_on_cpu && key.owner == kEveryRank);
  return (held * (is_twice ? 2 : 1) + longest) * key.itemsize;
}

}  // namespace funcol::python
