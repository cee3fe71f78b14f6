// The eager in-place collectives and point-to-point calls. Each takes its arguments by position. Collectives
// return None after they have written into their destinations. All return NotImplemented where Python has to
// call the functional collectives, or the operators that a layer knows (see tensor_argument()).
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "ops/collectives.h"
#include "ops/in_place.h"
#include "pyobjects/arguments.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

template <typename Write>
PyObject* none_if(const Write& write) {
  bool is_written = false;
  {
    const WithoutGil no_gil;
    is_written = write();
  }
  return is_written ? Py_NewRef(Py_None) : not_implemented();
}

template <typename StartCollective>
PyObject* sole_pending(const at::Tensor& tensor, const StartCollective& start) {
  at::Tensor result;
  {
    const WithoutGil no_gil;
    if (starts_here(tensor)) {
      result = start();
    }
  }
  return result.defined() ? THPVariable_Wrap(std::move(result)) : not_implemented();
}

// Calls `run` with the group that the two arguments from `args` on name.
template <typename Run>
PyObject* with_group(at::TensorList tensors, Args args, const char* op, const Run& run) {
  return is_shape_only(tensors, args[0]) ? not_implemented() : run(group_argument(args[0], args[1], op));
}

PyObject* all_reduce_into(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "all_reduce";
  return with_input(args, count, 4, kOp, [&](const at::Tensor& tensor) {
    const auto reduce_op = reduce_op_argument(args[1], kOp);
    return with_group(tensor, args + 2, kOp, [&](const GroupPtr& group) {
      return none_if([&] { return funcol::all_reduce_into(tensor, reduce_op, group); });
    });
  });
}

PyObject* broadcast_into(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "broadcast";
  return with_input(args, count, 4, kOp, [&](const at::Tensor& tensor) {
    const auto source = int_argument(args[1], "src", kOp);
    return with_group(tensor, args + 2, kOp, [&](const GroupPtr& group) {
      return none_if([&] { return funcol::broadcast_into(tensor, source, group); });
    });
  });
}

PyObject* all_gather_into(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "all_gather_tensor";
  return with_input(args, count, 4, kOp, [&](const at::Tensor& input) {
    const auto out = tensor_argument(args[1], kOp);
    return with_group(input, args + 2, kOp, [&](const GroupPtr& group) {
      return none_if([&] { return out.defined() && funcol::all_gather_into(out, input, group); });
    });
  });
}

PyObject* reduce_scatter_into(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "reduce_scatter_tensor";
  return with_input(args, count, 5, kOp, [&](const at::Tensor& input) {
    const auto out = tensor_argument(args[1], kOp);
    const auto reduce_op = reduce_op_argument(args[2], kOp);
    return with_group(input, args + 3, kOp, [&](const GroupPtr& group) {
      return none_if(
          [&] { return out.defined() && funcol::reduce_scatter_into(out, input, reduce_op, group); });
    });
  });
}

PyObject* all_gather_into_list(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "all_gather_tensor";
  return with_input(args, count, 4, kOp, [&](const at::Tensor& input) {
    std::vector<at::Tensor> outs;
    const bool are_plain = tensors_argument(args[1], outs, kOp);
    return with_group(input, args + 2, kOp, [&](const GroupPtr& group) {
      return none_if([&] { return are_plain && funcol::all_gather_into_list(outs, input, group); });
    });
  });
}

PyObject* reduce_scatter_list_into(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "reduce_scatter_tensor";
  return with_inputs(args, count, 5, kOp, [&](at::TensorList inputs) {
    const auto out = tensor_argument(args[1], kOp);
    const auto reduce_op = reduce_op_argument(args[2], kOp);
    return with_group(inputs, args + 3, kOp, [&](const GroupPtr& group) {
      return none_if(
          [&] { return out.defined() && funcol::reduce_scatter_list_into(out, inputs, reduce_op, group); });
    });
  });
}

PyObject* isend(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "isend";
  return with_input(args, count, 5, kOp, [&](const at::Tensor& tensor) {
    const auto destination = int_argument(args[1], "dst", kOp);
    const auto tag = int_argument(args[2], "tag", kOp);
    return with_group(tensor, args + 3, kOp, [&](const GroupPtr& group) {
      return sole_pending(tensor,
                          [&] { return as_sole_pending(start_send(tensor, destination, tag, group)); });
    });
  });
}

PyObject* irecv(PyObject*, Args args, Py_ssize_t count) {
  constexpr auto kOp = "irecv";
  return with_input(args, count, 5, kOp, [&](const at::Tensor& tensor) {
    const auto source = int_argument(args[1], "src", kOp);
    const auto tag = int_argument(args[2], "tag", kOp);
    return with_group(tensor, args + 3, kOp, [&](const GroupPtr& group) {
      return sole_pending(tensor,
                          [&] { return as_received(start_receive(tensor, source, tag, group), {0})[0]; });
    });
  });
}

}  // namespace

void bind_in_place(PyObject* module) {
  static PyMethodDef functions[] = {
      fast<all_reduce_into>("all_reduce_into"),
      fast<broadcast_into>("broadcast_into"),
      fast<all_gather_into>("all_gather_into"),
      fast<reduce_scatter_into>("reduce_scatter_into"),
      fast<all_gather_into_list>("all_gather_into_list"),
      fast<reduce_scatter_list_into>("reduce_scatter_list_into"),
      fast<isend>("isend"),
      fast<irecv>("irecv"),
      {},
  };
  add_functions(module, functions);
}

}  // namespace funcol::python
