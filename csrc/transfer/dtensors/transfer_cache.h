// The cache of transfers: of the program of this rank, and of the spec of the result.
//
// Everything here needs the GIL, which is also the lock of the cache.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "layout/heap_bytes.h"
#include "planner/cost_model.h"
#include "pyobjects/meshes.h"
#include "pyobjects/specs.h"
#include "transfer/transfer_program.h"

namespace funcol::python {

// The options for planning and running a redistribution.
struct RedistributionOptions {
  bool async_op = false;
  std::optional<CostModel> model = {};      // nullopt: the mesh's default model
  std::optional<int64_t> max_bytes = {};    // the most memory that a step may take; nullopt: any
  std::optional<CostModel> dst_model = {};  // of another mesh that the tensor goes to, likewise
};

constexpr int64_t kEveryRank = -1;
constexpr int64_t kNoRank = -2;

// The key of a transfer: within a mesh, to another mesh, or to a rank of the mesh and back. Stride and dtype
// are empty if the caller has the result's spec.
struct TransferKey {
  uint64_t mesh_id = 0;
  Layout src;  // as given: an empty order is the default one. No placements: `owner` has the full tensor.
  Layout dst;  // likewise
  std::vector<int64_t> shape;
  int64_t itemsize = 0;                 // of the elements that are sent
  std::optional<CostModel> model = {};  // nullopt: the mesh's default model
  std::optional<int64_t> max_bytes = {};
  std::vector<int64_t> stride = {};          // of the full tensor
  std::optional<at::ScalarType> dtype = {};  // of the result
  uint64_t dst_mesh_id = 0;                  // 0: the same mesh
  std::optional<CostModel> dst_model = {};
  int64_t owner = kNoRank;          // the row-major number of a rank in the mesh; kEveryRank; kNoRank
  bool handles_all_owners = false;  // to or from `owner` by a group of all ranks

  // Leaves out models, bounds and dtypes, which rarely differ.
  size_t hash() const;
  size_t heap_bytes() const {
    return funcol::heap_bytes(src) + funcol::heap_bytes(dst) + funcol::heap_bytes(shape) +
           funcol::heap_bytes(stride);
  }
  bool is_on(uint64_t id) const { return id == mesh_id || id == dst_mesh_id; }
  friend bool operator==(const TransferKey&, const TransferKey&) = default;
};

// A cached transfer: the program of this rank, and the spec of the result without its mesh. DTensors get
// copies, by copy_onto(). The spec is null if the caller has it.
struct CachedTransfer {
  TransferProgramPtr program;
  py::object spec;

  size_t heap_bytes() const { return funcol::heap_bytes(program) + (spec ? kSpecBytes : 0); }
};

using MakeProgram = std::function<TransferProgram(const TransferKey&)>;

// Returns the cached program of `key`, or makes and caches it by `make`. Raises ValueError if planning throws
// std::invalid_argument.
TransferProgramPtr find_program(const TransferKey& key, const MakeProgram& make);

// Returns the transfer of a tensor of `src_spec` to `placements`, which have no masks, on `device_mesh`, and
// `order`, a shard order or None. Raises ValueError for placements that the tensor cannot have, and if there
// is not a plan.
CachedTransfer find_transfer(const TransferKey& key, py::handle src_spec, py::handle device_mesh,
                             py::handle placements, py::handle order, const MakeProgram& make);

// Returns a maker of programs of redistributions within `device_mesh`, which are empty on a rank outside of
// it. find_program() raises ValueError if there is no plan.
MakeProgram within_mesh(py::handle device_mesh, KnownMesh& known);

// Completes `given` for a tensor of `shape` on `mesh`. Raises ValueError naming `side` if it is inconsistent.
Layout checked_layout(const char* side, const Layout& given, const Mesh& mesh,
                      const std::vector<int64_t>& shape);

// Prepares `plan` for this rank, which is inside the mesh.
ExecutionPtr make_execution(const Plan& plan, py::handle device_mesh, KnownMesh& known);

// Returns the hooks of the masks in `key`, empty if there are none. Numbers the masks, whose values are
// addresses: a plan depends only on which masks are the same. The hooks take the GIL to call Python. Both
// specs must outlive them.
MaskHooks make_mask_hooks(TransferKey& key, const SpecObjects& src, const SpecObjects& dst);

}  // namespace funcol::python
