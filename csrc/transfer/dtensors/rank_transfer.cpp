#include "transfer/dtensors/rank_transfer.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/process_group.h"
#include "layout/cache.h"
#include "layout/hash.h"
#include "layout/tensor_meta.h"
#include "pyobjects/attributes.h"
#include "transfer/op_names.h"
#include "transfer/transfer_exchange.h"

namespace funcol::python {
namespace {

Cache<RankTransferKey, BatchItem>& rank_transfers() {
  static auto* const cache =
      new Cache<RankTransferKey, BatchItem>(find_table("rank_transfers"));  // NOLINT: outlives Python
  return *cache;
}

// The layout of the tensor once its partials are reduced.
Layout reduced(Layout layout) {
  for (auto& placement : layout.placements) {
    placement = placement.is_partial() ? Placement::replicate() : placement;
  }
  return layout;
}

Layout replicated(const Mesh& mesh) { return {std::vector<Placement>(mesh.sizes.size()), {}}; }

Layout checked_layout(const RankTransferKey& key, const Mesh& mesh) {
  try {
    const auto num_dims = static_cast<int64_t>(key.shape.size());
    const auto layout =
        make_layout("funcol::redistribute", key.layout.placements, key.layout.order, mesh, num_dims);
    return without_strided_shards(layout, mesh, key.shape);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

bool has_group(AxisSet axes, const Mesh& mesh) {
  return num_axes(axes) == 1 || std::ranges::find(mesh.merged, axes) != mesh.merged.end();
}

// The axes along whose group the tensor moves; none if nobody sends. `is_p2p`: no group has just these ranks.
AxisSet axes_of_move(const RankTransferKey& key, const Layout& layout, const Mesh& mesh, bool& is_p2p) {
  AxisSet cutting = 0;
  AxisSet all = 0;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    all |= mesh.sizes[axis] > 1 ? axis_set(axis) : 0;
    cutting |= mesh.sizes[axis] > 1 && layout.placements[axis].is_shard() ? axis_set(axis) : 0;
  }
  is_p2p = false;
  if (!key.is_back && !key.is_for_all && (cutting == 0 || has_group(cutting, mesh))) {
    return cutting;
  }
  is_p2p = all != 0 && !has_group(all, mesh);
  return all;
}

// The ranks that send their shards to the one numbered `holder`: of those with the same shard the one that
// agrees with it on the axes that replicate.
RankedMesh senders_to(int64_t holder, const RankedMesh& every, const Layout& layout) {
  const auto& mesh = every.mesh;
  const auto coordinate = mesh.coordinate(holder);
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
    senders.ranks.push_back(every.ranks[number_in_mesh(sender, mesh)]);
  }
  return senders;
}

BatchItem make_move(const RankTransferKey& key, py::handle device_mesh, KnownMesh& known) {
  const auto& mesh = known.mesh;
  TORCH_INTERNAL_ASSERT(known.coordinate.has_value());
  const auto layout = reduced(checked_layout(key, mesh));
  BatchItem item;
  const auto device_type = attribute<"device_type">(device_mesh).cast<std::string>();
  item.bytes = bytes_of_move(key, mesh, device_type == "cpu");
  if (!key.is_back) {
    RedistributionKey reduction;
    reduction.mesh_id = key.mesh_id;
    reduction.src = key.layout;
    reduction.dst = key.holder == kEveryRank ? replicated(mesh) : reduced(key.layout);
    reduction.shape = key.shape;
    reduction.itemsize = key.itemsize;
    item.execution = find_execution(reduction, device_mesh, known);
  }
  bool is_p2p = false;
  const auto axes = key.holder == kEveryRank ? 0 : axes_of_move(key, layout, mesh, is_p2p);
  if (axes == 0) {
    return item;
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
      group.ranks.push_back(number_in_mesh(ranks.coordinate(rank), mesh));
    }
  }
  const Mesh alone{{1}, {}, {}};
  const RankedMesh holder{alone, {every.ranks[key.holder]}};
  MeshChangeTask task{
      senders_to(key.holder, every, layout), layout, holder, replicated(alone), key.shape, key.itemsize};
  if (key.is_back) {
    task = {holder, replicated(alone), every, layout, key.shape, key.itemsize};
  }
  const auto own = every.ranks[number_in_mesh(*known.coordinate, mesh)];
  auto last = packed_transfer(plan_transfer(task), group, own, /*keeps_in_buffer=*/true);
  last.participants = is_p2p ? c10::str(at::IntArrayRef(every.ranks)) : "";
  last.description = c10::str(key.is_back ? "from" : "to", " rank ", key.holder, ", ", to_string(layout),
                              " of ", at::IntArrayRef(key.shape));
  item.last = std::make_shared<const PackedExchange>(std::move(last));
  item.last_id = shared_signature(item.last->signature());
  return item;
}

}  // namespace

size_t RankTransferKey::hash() const {
  Hash hash;
  hash.add(mesh_id);
  hash.add(layout);
  hash.add_all(shape);
  hash.add(static_cast<uint64_t>(holder));
  hash.add(static_cast<uint64_t>(is_back));
  return hash.value();
}

BatchItem item_of_move(const RankTransferKey& key, py::handle device_mesh, KnownMesh& known,
                       at::Tensor local) {
  const auto* const found = rank_transfers().find(key);
  auto item = found != nullptr ? *found : make_move(key, device_mesh, known);
  if (found == nullptr) {
    rank_transfers().put(key, item);
  }
  item.local = std::move(local);
  return item;
}

int64_t bytes_of_move(const RankTransferKey& key, const Mesh& mesh, bool is_on_cpu) {
  const auto layout = checked_layout(key, mesh);
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
  int64_t held = key.holder == kEveryRank ? longest * mesh.num_ranks(cutting) : num_elements(key.shape);
  if (key.holder == kEveryRank && num_axes(cutting) > 1 && !has_group(cutting, mesh)) {
    held += held / least;  // it is gathered axis by axis: the tensor before the last gather
  }
  if (cutting == 0 && !is_partial) {
    return 0;
  }
  // gloo gathers and reduces in a buffer of its own.
  const bool is_twice = is_partial || (is_on_cpu && key.holder == kEveryRank);
  return (held * (is_twice ? 2 : 1) + longest) * key.itemsize;
}

int64_t number_in_mesh(const Coordinate& coordinate, const Mesh& mesh) {
  int64_t number = 0;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    number = number * mesh.sizes[axis] + coordinate[axis];
  }
  return number;
}

}  // namespace funcol::python
