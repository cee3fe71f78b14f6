// What FSDP2 does for the gradients of a group: see bind_fully_shard.cpp.
#include <ATen/ops/as_strided.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "async/async_tensor.h"
#include "bindings/dtensor_objects.h"
#include "bindings/fast_functions.h"
#include "bindings/fully_shard_objects.h"
#include "bindings/python_args.h"
#include "bindings/without_gil.h"

namespace funcol::python {
namespace {

// (group): the parameters that have a gradient to reduce and these gradients, which are taken from them.
PyObject* fsdp_take_gradients(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_take_gradients");
  const auto group = usual_group(args[0]);
  // Either may ask for zeros in the place of a gradient.
  if (!group || !group->fields.is<"_partial_reduce_output">(Py_None) ||
      !group->fields.is<"reduce_scatter_unused_params">(Py_False)) {
    return not_implemented();
  }
  py::list with_gradient;
  py::list gradients;
  for (const auto index : to_ints(group->fields.get<"_reduce_scatter_param_indices">().ptr())) {
    const auto& param = group->params.at(index);
    const auto unsharded = param.find<"_unsharded_param">();
    if (!unsharded) {
      continue;
    }
    auto gradient = attribute<"grad">(unsharded);
    if (gradient.is_none()) {
      continue;
    }
    if (param.is<"is_dtensor">(Py_True) || param.is<"is_spmd_types">(Py_True)) {
      gradient = attribute<"unsharded_grad_data">(param.object());
    }
    with_gradient.append(py::handle(param.object()));
    gradients.append(std::move(gradient));
    set_attribute<"grad">(unsharded.ptr(), Py_None);
  }
  return py::make_tuple(with_gradient, gradients).release().ptr();
  END_HANDLE_TH_ERRORS
}

// (params, gradients, num_ranks): the gradients' sizes, dim 0 made a multiple of the number of ranks.
PyObject* fsdp_padded_sizes(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 3, "fsdp_padded_sizes");
  auto* const size_type = imported<"torch", "Size">().ptr();
  const auto params = can_serve() ? usual_params(args[0]) : std::nullopt;
  const auto num_ranks = to_int(args[2]);
  if (!params || num_ranks < 1 || !PyList_CheckExact(args[1]) ||
      PyList_GET_SIZE(args[1]) != static_cast<Py_ssize_t>(params->size())) {
    return not_implemented();
  }
  py::tuple result(params->size());
  for (size_t i = 0; i < params->size(); ++i) {
    const auto* const gradient = plain_tensor(PyList_GET_ITEM(args[1], static_cast<Py_ssize_t>(i)));
    if (gradient == nullptr || gradient->dim() == 0 || !is_cut_along_dim_0((*params)[i])) {
      return not_implemented();
    }
    py::tuple sizes(gradient->dim());
    for (int64_t dim = 0; dim < gradient->dim(); ++dim) {
      const auto size = gradient->size(dim);
      sizes[dim] = py::int_(dim > 0 ? size : (size + num_ranks - 1) / num_ranks * num_ranks);
    }
    result[i] = checked(PyObject_CallOneArg(size_type, sizes.ptr()));
  }
  return result.release().ptr();
  END_HANDLE_TH_ERRORS
}

// (params): the type that all their sharded gradients have, None if they take any; NotImplemented if they
// differ, if some go to the CPU from elsewhere or are added to what is no DTensor.
PyObject* fsdp_gradient_type(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_gradient_type");
  const auto params = can_serve() ? usual_params(args[0]) : std::nullopt;
  if (!params || params->empty()) {
    return not_implemented();
  }
  auto type = params->front().get<"sharded_grad_dtype">();
  for (const auto& param : *params) {
    const auto sum = attribute<"grad">(param.get<"sharded_param">());
    const bool can_add = sum.is_none() || Py_TYPE(sum.ptr()) == dtensor_type();
    if (!can_add || !param.is<"sharded_grad_dtype">(type.ptr()) || !param.is<"offload_to_cpu">(Py_False)) {
      return not_implemented();
    }
  }
  return type.release().ptr();
  END_HANDLE_TH_ERRORS
}

// The DTensor that `local` is this rank's shard of; null if there is no spec for its type yet.
py::object sharded_dtensor(const Fields& param, PyObject* local) {
  const auto& tensor = THPVariable_Unpack(local);
  auto spec = param.find<"_sharding_spec">();
  if (const auto by_type = param.find<"_sharding_spec_by_dtype">()) {
    auto* const type = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
    spec = PyDict_GetItemWithError(by_type.ptr(), type);
  }
  return spec ? make_dtensor(local, spec, tensor.requires_grad()) : py::object();
}

// (param, local)
PyObject* fsdp_sharded_dtensor(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "fsdp_sharded_dtensor");
  const auto* const local = plain_tensor(args[1]);
  const auto param = can_serve() ? usual(args[0], fully_shard().param) : std::nullopt;
  if (local == nullptr || !param || to_ints(param->get<"sharded_size">().ptr()) != local->sizes()) {
    return not_implemented();
  }
  auto dtensor = sharded_dtensor(*param, args[1]);
  return dtensor ? dtensor.release().ptr() : not_implemented();
  END_HANDLE_TH_ERRORS
}

// Adds `local` to the gradient that a sharded parameter has, or makes it the gradient, and runs the hooks
// that wait for one.
void accumulate(const Fields& fsdp_param, const py::object& local) {
  const auto param = fsdp_param.get<"sharded_param">();
  const auto sum = attribute<"grad">(param);
  if (sum.is_none()) {
    auto gradient = sharded_dtensor(fsdp_param, local.ptr());
    if (!gradient) {
      gradient = py::handle(fsdp_param.object()).attr("to_sharded_dtensor")(local);
    }
    set_attribute<"grad">(param.ptr(), gradient.ptr());
  } else {
    const auto added = checked(PyNumber_InPlaceAdd(attribute<"_local_tensor">(sum).ptr(), local.ptr()));
    set_attribute<"_local_tensor">(sum.ptr(), added.ptr());
  }
  const auto hooks = find_attribute<"_post_accumulate_grad_hooks">(param);
  if (hooks && PyObject_IsTrue(hooks.ptr()) == 1) {
    for (const auto hook : py::list(hooks.attr("values")())) {
      hook(param);
    }
  }
}

// (buffer, params, padded sizes, num_ranks): gives each parameter its part of the reduced gradients, which
// lie in `buffer` one after another.
PyObject* fsdp_accumulate(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 4, "fsdp_accumulate");
  const auto& buffer = THPVariable_Unpack(args[0]);
  const auto num_params = PyList_GET_SIZE(args[1]);
  const auto padded = checked(PySequence_Fast(args[2], "padded sizes"));
  const auto num_ranks = to_int(args[3]);
  auto offset = buffer.storage_offset();
  for (Py_ssize_t i = 0; i < num_params; ++i) {
    const Fields param(PyList_GET_ITEM(args[1], i));
    auto local = at::as_strided(buffer, to_ints(param.get<"sharded_size">().ptr()),
                                to_ints(param.get<"contiguous_sharded_stride">().ptr()), offset);
    accumulate(param, py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(local))));
    const auto sizes = to_ints(PySequence_Fast_GET_ITEM(padded.ptr(), i));
    offset += std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()) / num_ranks;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (gradients, buffer, num_ranks): lays them into `buffer` as a reduce_scatter takes them, padded with zeros:
// of each the first rank's rows, then of each the second rank's.
PyObject* fsdp_reduce_copy_in(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 3, "fsdp_reduce_copy_in");
  const auto* const buffer = plain_tensor(args[1]);
  const auto num_ranks = to_int(args[2]);
  if (buffer == nullptr || !is_small_on_cpu(*buffer) || !can_serve() || !PyList_CheckExact(args[0])) {
    return not_implemented();
  }
  std::vector<at::Tensor> gradients;
  int64_t num_elements = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    const auto* const gradient = plain_tensor(PyList_GET_ITEM(args[0], i));
    if (gradient == nullptr || !gradient->is_cpu() || gradient->dim() == 0 || !gradient->is_contiguous() ||
        gradient->scalar_type() != buffer->scalar_type() || gradient->is_conj() || gradient->is_neg()) {
      return not_implemented();
    }
    const auto num_rows = (gradient->size(0) + num_ranks - 1) / num_ranks * num_ranks;
    num_elements += gradient->size(0) == 0 ? 0 : num_rows * (gradient->numel() / gradient->size(0));
    settle(*gradient);
    gradients.push_back(*gradient);
  }
  if (num_elements != buffer->numel()) {
    return not_implemented();
  }
  const WithoutGil without_gil;
  auto* to = bytes_of(*buffer);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (const auto& gradient : gradients) {
      const auto num_rows = gradient.size(0);
      if (num_rows == 0) {
        continue;
      }
      const auto rows_per_rank = (num_rows + num_ranks - 1) / num_ranks;
      const auto row_size = gradient.nbytes() / num_rows;
      const auto first = std::min(num_rows, rank * rows_per_rank);
      const auto num_here = std::min(num_rows, first + rows_per_rank) - first;
      if (num_here > 0) {
        std::memcpy(to, static_cast<const std::byte*>(gradient.const_data_ptr()) + first * row_size,
                    num_here * row_size);
      }
      std::memset(to + num_here * row_size, 0, (rows_per_rank - num_here) * row_size);
      to += rows_per_rank * row_size;
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef* gradient_functions() {
  static PyMethodDef functions[] = {fast<fsdp_take_gradients>("fsdp_take_gradients"),
                                    fast<fsdp_padded_sizes>("fsdp_padded_sizes"),
                                    fast<fsdp_gradient_type>("fsdp_gradient_type"),
                                    fast<fsdp_reduce_copy_in>("fsdp_reduce_copy_in"),
                                    fast<fsdp_accumulate>("fsdp_accumulate"),
                                    fast<fsdp_sharded_dtensor>("fsdp_sharded_dtensor"),
                                    {nullptr, nullptr, 0, nullptr}};
  return functions;
}

}  // namespace funcol::python
