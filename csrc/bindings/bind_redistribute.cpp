// Redistribution from one DTensorSpec to another: one crossing from Python a call.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "async/layers.h"
#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "bindings/python_args.h"
#include "bindings/redistribution_specs.h"
#include "bindings/without_gil.h"

namespace funcol::python {
namespace {

constexpr auto kOp = "redistribute_local_tensor";

// While one lives, PyTorch's DebugMode, if one is active, notes what runs as a part of this redistribution.
class DebugNote {
 public:
  DebugNote(py::handle local, const SpecObjects& src, const SpecObjects& dst, const Execution& execution,
            bool is_explicit) {
    if (has_active_layers() && !execution.steps().empty()) {
      note_ = python_function("_debug_note")(local, src.placements, dst.placements, execution.trace(),
                                             is_explicit);
      note_.attr("__enter__")();
    }
  }
  ~DebugNote() {
    if (note_) {
      try {
        note_.attr("__exit__")(py::none(), py::none(), py::none());
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("funcol.redistribute");
      }
    }
  }
  DebugNote(const DebugNote&) = delete;
  DebugNote& operator=(const DebugNote&) = delete;

 private:
  py::object note_;
};

// Whether PyTorch moves a tensor of `sizes` rightly where `held` are the sizes that the source gives this
// rank, as if another mesh cut it, too. It moves what it is given; but along dims that are cut unevenly it
// pads and cuts off by the shape of the whole tensor.
bool stock_moves(at::IntArrayRef sizes, const std::vector<int64_t>& held, const ExecutionKey& key,
                 const Mesh& mesh) {
  const auto num_dims = std::ssize(key.shape);
  if (std::ssize(sizes) != num_dims) {
    return true;
  }
  for (const auto* spec : {&key.src, &key.dst}) {
    std::vector<int64_t> num_shards(num_dims, 1);
    for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
      const auto& placement = spec->placements[axis];
      if (placement.is_shard() && key.src.placements[axis].is_shard()) {
        num_shards[placement.dim + (placement.dim < 0 ? num_dims : 0)] *= mesh.sizes[axis];
      }
    }
    for (int64_t dim = 0; dim < num_dims; ++dim) {
      if (sizes[dim] != held[dim] && key.shape[dim] % num_shards[dim] != 0) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

PyObject* redistribute_local_tensor(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8, "funcol::", kOp, ": ", count, " arguments, expected 8.");
  TORCH_CHECK_TYPE(THPVariable_Check(args[0]), "funcol::", kOp, ": got a ", Py_TYPE(args[0])->tp_name,
                   " where a tensor belongs.");
  const SpecObjects src(args[1]);
  const SpecObjects dst(args[2]);
  const auto same_mesh = PyObject_RichCompareBool(src.mesh.ptr(), dst.mesh.ptr(), Py_EQ);
  if (same_mesh < 0) {
    throw py::error_already_set();
  }
  TORCH_CHECK_NOT_IMPLEMENTED(same_mesh == 1, "funcol::", kOp, ": the source is on ",
                              std::string(py::repr(src.mesh)), ", the target on ",
                              std::string(py::repr(dst.mesh)),
                              ". Redistribution moves data within one DeviceMesh only.");
  auto& known = known_mesh(src.mesh);
  if (!known.coordinate.has_value()) {
    Py_INCREF(args[0]);
    return args[0];
  }
  const at::Tensor local = THPVariable_Unpack(args[0]);
  ExecutionKey key{
      known.id, src.read(), dst.read(), shape_of(args[1], kOp), static_cast<int64_t>(local.itemsize()),
      {},       {}};
  if (args[4] != Py_None) {
    key.model = py::handle(args[4]).cast<CostModel>();
  }
  if (args[5] != Py_None) {
    key.max_bytes = int_argument(args[5], "max_bytes", kOp);
  }
  MaskHooks masks;
  if (has_masks(key)) {
    number_masks(key);
    masks = mask_hooks(src, dst);
  }
  const auto execution = execution_of(std::move(key), src.mesh, known);
  if (args[7] == Py_True && !execution->fits(local)) {
    const ExecutionKey task{known.id, src.read(), dst.read(), shape_of(args[1], kOp), 0, {}, {}};
    const auto sizes = c10::asIntArrayRefSlowOpt(local.sym_sizes());
    if (!sizes.has_value() || stock_moves(*sizes, execution->shape_before(), task, known.mesh)) {
      return not_implemented();
    }
  }
  const DebugNote note(args[0], src, dst, *execution, args[6] == Py_True);
  at::Tensor result;
  {
    const WithoutGil no_gil;
    result = execution->run(local, args[3] == Py_True, masks);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

void bind_redistribute(PyObject* module) {
  static PyMethodDef functions[] = {
      fast<redistribute_local_tensor>("redistribute_local_tensor"),
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(module, functions) != 0) {
    throw python_error();
  }
}

}  // namespace funcol::python
