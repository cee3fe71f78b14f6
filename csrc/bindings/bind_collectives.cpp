// The eager collectives. Each takes its arguments by position and returns pending tensors, or NotImplemented
// where Python has to call the operators that a layer knows (see tensor_argument()).
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_strings.h>

#include <utility>

#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "comm/agreement.h"
#include "comm/group_ref.h"
#include "dtensor/forget.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/wire.h"
#include "pyobjects/arguments.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

// Starts a collective on plain tensors, or calls its op: on the meta device, or to record a gradient. Without
// the GIL, since either may copy and take locks.
template <typename StartCollective, typename CallOp>
PyObject* sole_result(const at::Tensor& input, const StartCollective& start, const CallOp& call_op) {
  at::Tensor result;
  {
    const WithoutGil no_gil;
    result = starts_here(input) ? as_sole_pending(start()) : call_op();
  }
  return THPVariable_Wrap(std::move(result));
}

template <typename StartCollective, typename CallOp>
PyObject* list_result(at::TensorList inputs, const StartCollective& start, const CallOp& call_op) {
  std::vector<at::Tensor> results;
  {
    const WithoutGil no_gil;
    results = starts_here(inputs) ? as_pending(start()) : call_op();
  }
  return to_python(std::move(results)).release().ptr();
}

PyObject* all_reduce(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "all_reduce";
  return with_input(args, count, 4, kOp, [&](const at::Tensor& input) {
    const auto reduce_op = reduce_op_argument(args[1], kOp);
    const auto group = group_argument(args[2], args[3], kOp);
    return sole_result(
        input, [&] { return start_all_reduce(input, reduce_op, group); },
        [&] {
          check_all_reduce(input, reduce_op, *group, kOp);
          return call::all_reduce(input, as_ivalue(reduce_op), as_ivalue(group));
        });
  });
}

PyObject* all_gather_tensor(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "all_gather_tensor";
  return with_input(args, count, 5, kOp, [&](const at::Tensor& input) {
    const auto dim = int_argument(args[1], "gather_dim", kOp);
    const auto group = group_argument(args[2], args[3], kOp);
    const auto sizes = SplitSizes(args[4], kOp);
    return sole_result(
        input, [&] { return start_uneven_all_gather(input, dim, group, sizes.ints()); },
        [&] {
          check_all_gather(input, dim, kOp);
          return call::all_gather_along_dim(input, dim, as_ivalue(group), sizes.symints());
        });
  });
}

PyObject* reduce_scatter_tensor(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "reduce_scatter_tensor";
  return with_input(args, count, 6, kOp, [&](const at::Tensor& input) {
    const auto reduce_op = reduce_op_argument(args[1], kOp);
    const auto dim = int_argument(args[2], "scatter_dim", kOp);
    const auto group = group_argument(args[3], args[4], kOp);
    const auto sizes = SplitSizes(args[5], kOp);
    return sole_result(
        input, [&] { return start_uneven_reduce_scatter(input, reduce_op, dim, group, sizes.ints()); },
        [&] {
          if (!sizes.given()) {
            check_reduce_scatter(input, reduce_op, dim, *group, kOp);
          }
          return call::reduce_scatter_along_dim(input, as_ivalue(reduce_op), dim, as_ivalue(group),
                                                sizes.symints());
        });
  });
}

PyObject* all_to_all_single(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "all_to_all_single";
  return with_input(args, count, 5, kOp, [&](const at::Tensor& input) {
    const auto output_splits = ints_argument(args[1], "output_split_sizes", kOp);
    const auto input_splits = ints_argument(args[2], "input_split_sizes", kOp);
    const auto group = group_argument(args[3], args[4], kOp);
    return sole_result(
        input, [&] { return start_all_to_all(input, output_splits, input_splits, group); },
        [&] {
          check_all_to_all(input, output_splits, input_splits, *group);
          return call::all_to_all_single(input, c10::fromIntArrayRefSlow(output_splits),
                                         c10::fromIntArrayRefSlow(input_splits), as_ivalue(group));
        });
  });
}

PyObject* broadcast(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "broadcast";
  return with_input(args, count, 4, kOp, [&](const at::Tensor& input) {
    const auto source = int_argument(args[1], "src", kOp);
    const auto group = group_argument(args[2], args[3], kOp);
    return sole_result(
        input, [&] { return start_broadcast(input, source, group); },
        [&] {
          check_broadcast(source, *group, kOp);
          return call::broadcast(input, source, as_ivalue(group));
        });
  });
}

PyObject* permute_tensor(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "permute_tensor";
  return with_input(args, count, 4, kOp, [&](const at::Tensor& input) {
    const auto destinations = ints_argument(args[1], "src_dst", kOp);
    const auto group = group_argument(args[2], args[3], kOp);
    return sole_result(
        input, [&] { return start_permute(input, destinations, group); },
        [&] {
          check_permute(destinations, *group);
          return call::permute_tensor(input, destinations, as_ivalue(group));
        });
  });
}

PyObject* reduce(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "reduce";
  return with_input(args, count, 5, kOp, [&](const at::Tensor& input) {
    const auto reduce_op = reduce_op_argument(args[1], kOp);
    const auto destination = int_argument(args[2], "dst", kOp);
    const auto group = group_argument(args[3], args[4], kOp);
    return sole_result(
        input, [&] { return start_reduce(input, reduce_op, destination, group); },
        [&] {
          check_rank(destination, *group, "dst", kOp);
          return call::reduce(input, as_ivalue(reduce_op), destination, as_ivalue(group));
        });
  });
}

PyObject* scatter(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "scatter";
  return with_input(args, count, 6, kOp, [&](const at::Tensor& input) {
    const auto source = int_argument(args[1], "src", kOp);
    const auto dim = int_argument(args[2], "scatter_dim", kOp);
    const auto group = group_argument(args[3], args[4], kOp);
    const auto sizes = SplitSizes(args[5], kOp);
    return sole_result(
        input, [&] { return start_scatter(input, source, dim, group, sizes.ints()); },
        [&] { return call::scatter(input, source, dim, as_ivalue(group), sizes.symints()); });
  });
}

PyObject* gather(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "gather";
  return with_input(args, count, 6, kOp, [&](const at::Tensor& input) {
    const auto destination = int_argument(args[1], "dst", kOp);
    const auto dim = int_argument(args[2], "gather_dim", kOp);
    const auto group = group_argument(args[3], args[4], kOp);
    const auto sizes = SplitSizes(args[5], kOp);
    return sole_result(
        input, [&] { return start_gather(input, destination, dim, group, sizes.ints()); },
        [&] { return call::gather(input, destination, dim, as_ivalue(group), sizes.symints()); });
  });
}

PyObject* all_reduce_coalesced(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "all_reduce_coalesced";
  return with_inputs(args, count, 4, kOp, [&](at::TensorList inputs) {
    const auto reduce_op = reduce_op_argument(args[1], kOp);
    const auto group = group_argument(args[2], args[3], kOp);
    return list_result(
        inputs, [&] { return start_all_reduce_coalesced(inputs, reduce_op, group); },
        [&] {
          check_all_reduce(inputs, reduce_op, *group, kOp);
          return call::all_reduce_coalesced(inputs, as_ivalue(reduce_op), as_ivalue(group));
        });
  });
}

PyObject* all_gather_into_tensor_coalesced(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "all_gather_into_tensor_coalesced";
  return with_inputs(args, count, 3, kOp, [&](at::TensorList inputs) {
    const auto group = group_argument(args[1], args[2], kOp);
    return list_result(
        inputs, [&] { return start_all_gather_coalesced(inputs, group); },
        [&] {
          check_all_gather(inputs, 0, kOp);
          return call::all_gather_into_tensor_coalesced(inputs, group->getSize(), as_ivalue(group));
        });
  });
}

PyObject* reduce_scatter_tensor_coalesced(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "reduce_scatter_tensor_coalesced";
  return with_inputs(args, count, 5, kOp, [&](at::TensorList inputs) {
    const auto reduce_op = reduce_op_argument(args[1], kOp);
    const auto dims = ints_argument(args[2], "scatter_dim", kOp);
    const auto group = group_argument(args[3], args[4], kOp);
    return list_result(
        inputs, [&] { return start_reduce_scatter_coalesced(inputs, reduce_op, dims, group); },
        [&] {
          check_reduce_scatter(inputs, reduce_op, dims, *group, kOp);
          return call::reduce_scatter_along_dims_coalesced(inputs, as_ivalue(reduce_op), dims,
                                                           as_ivalue(group));
        });
  });
}

PyObject* set_resolver(PyObject*, PyObject* resolver) {
  set_group_resolver(resolver);
  Py_RETURN_NONE;
}

PyObject* remember(PyObject*, PyObject* enabled) {
  remember_groups(enabled == Py_True);
  forget_groups();
  Py_RETURN_NONE;
}

PyObject* check_agreement_of_ranks(PyObject*, PyObject* begin) {
  check_agreement(begin == Py_True);
  Py_RETURN_NONE;
}

PyObject* forget_found_groups(PyObject*, PyObject*) {
  forget_groups();
  Py_RETURN_NONE;
}

template <void (*note)(const std::string&)>
PyObject* note_name(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  note(THPUtils_unpackString(name));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Also empties the caches of DTensors: they keep meshes, and so groups with their threads and connections.
PyObject* note_all_removed(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  note_all_groups_removed();
  python::forget();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

void bind_collectives(PyObject* module) {
  static PyMethodDef functions[] = {
      fast<all_reduce>("all_reduce"),
      fast<all_gather_tensor>("all_gather_tensor"),
      fast<reduce_scatter_tensor>("reduce_scatter_tensor"),
      fast<all_to_all_single>("all_to_all_single"),
      fast<broadcast>("broadcast"),
      fast<permute_tensor>("permute_tensor"),
      fast<reduce>("reduce"),
      fast<scatter>("scatter"),
      fast<gather>("gather"),
      fast<all_reduce_coalesced>("all_reduce_coalesced"),
      fast<all_gather_into_tensor_coalesced>("all_gather_into_tensor_coalesced"),
      fast<reduce_scatter_tensor_coalesced>("reduce_scatter_tensor_coalesced"),
      {"set_group_resolver", set_resolver, METH_O, nullptr},
      {"remember_groups", remember, METH_O, nullptr},
      {"check_agreement", check_agreement_of_ranks, METH_O, nullptr},
      {"forget_groups", forget_found_groups, METH_NOARGS, nullptr},
      {"note_group_added", note_name<note_group_added>, METH_O, nullptr},
      {"note_group_removed", note_name<note_group_removed>, METH_O, nullptr},
      {"note_all_groups_removed", note_all_removed, METH_NOARGS, nullptr},
      {},
  };
  add_functions(module, functions);
}

}  // namespace funcol::python
