// PyTorch's rule for views on all mesh axes, for inputs that it leaves as they are.
//
// PyTorch's counterpart: propagate_shape_and_sharding (torch.distributed.tensor._ops._view_ops).
#pragma once

#include <optional>
#include <vector>

#include "layout/layout.h"
#include "layout/mesh.h"
#include "propagation/op_call.h"

namespace funcol {

// Returns the placements of the result of a view whose input stays as it is. Returns nullopt for an operator
// that is not a view, and unless each sharded dim keeps its size or is cut evenly, before and after. A dim
// that is flattened after others has strided shards, which become plain ones where the dims are split again.
//
//   f32[8, 6] "S0", view to [2, 4, 6] on 2 ranks:     "S0"
//   f32[8, 6] "S1", view to [48] on 2 ranks:          "_S(0, 8)"
//   f32[48] "_S(0, 8)", view to [8, 6] on 2 ranks:    "S1"
//   f32[7, 6] "S0", view to [42] on 2 ranks:          nullopt
//
// call.outputs must be filled in.
std::optional<std::vector<Placement>> upstream_view(const OpCall& call, const Layout& layout,
                                                    const Mesh& mesh);

}  // namespace funcol
