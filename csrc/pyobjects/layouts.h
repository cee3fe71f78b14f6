// PyTorch's Python objects for layouts as values: placements, shard orders, device meshes.
//
// Everything here needs the GIL. An object of a wrong type raises TypeError. A placement of a kind that
// funcol does not know, such as a subclass of Partial, raises NotImplementedError: it is never taken for its
// base class.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/layout.h"
#include "pyobjects/attributes.h"

namespace funcol::python {

// Returns the value of a Replicate, Shard, _StridedShard, Partial of any reduction, or _MaskPartial, whose
// mask is the address of its mask_buffer. A Shard keeps a negative dim: make_layout() counts it from 0.
Placement to_placement(py::handle object);

// Returns the same, or the value of a norm partial, which PyTorch's rules make and take.
Placement to_placement_or_norm(py::handle object);
bool is_norm(py::handle placement);

// Returns the dim of a Shard; nullopt for other objects.
std::optional<int64_t> dim_of_shard(py::handle object);

// Returns the values of a sequence of placements, or of text such as "S0,R".
std::vector<Placement> to_placements(py::handle object);

// The values of the last placements read, which are read again only for another object.
class PlacementMemo {
 public:
  const std::vector<Placement>& read(const py::object& placements) {
    if (!placements.is(object_)) {
      placements_ = to_placements(placements);
      object_ = placements;
    }
    return placements_;
  }

 private:
  py::object object_;
  std::vector<Placement> placements_;
};

// Returns the value of a tuple of ShardOrderEntry(tensor_dim, mesh_dims), or of such pairs; an empty one for
// None, the default order.
ShardOrder to_shard_order(py::handle object);

// Returns the value of a DeviceMesh, or of a funcol._C.Mesh. `merged` names the sets of axes that already
// have a process group: flattened submeshes, and the world if the mesh is all of it in the order of ranks.
// Makes no group. The value is remembered while the DeviceMesh lives, and read again once the mesh is
// flattened further. The reference is valid until the next call for the same object.
const Mesh& to_mesh(py::handle object);

bool has_masks(const Layout& layout);
bool has_strided_shards(const Layout& layout);

inline constexpr AttributeName kPlacementTypes("torch.distributed.tensor.placement_types");

}  // namespace funcol::python
