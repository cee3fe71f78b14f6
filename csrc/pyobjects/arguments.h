// Python arguments of the collectives, converted without pybind11's overload machinery: the calls below
// are the ones whose cost users count in microseconds.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <vector>

#include "comm/process_group.h"
#include "comm/reduce_op.h"

namespace funcol::python {

// A torch function mode is active on this thread, other than the one that only tells functions which make
// tensors what device to use. To be called with the GIL.
bool has_function_mode();

// A mode, transform or tracer of PyTorch is active on this thread. To be called with the GIL.
bool is_observed();

// Null for what is no plain tensor: subclasses, tensors that belong to a mode or transform.
const at::Tensor* plain_tensor(PyObject* object);

// A plain tensor that nobody watches: no subclass with __torch_function__ or __torch_dispatch__, and no
// mode, transform or tracer active. Undefined if the call must take the dispatcher's way, in which all of
// these have their say. TypeError for what is no tensor. A reference of its own, taken with the GIL: the
// first one beyond Python's needs it, and torch.utils.swap_tensors must not take the tensor away meanwhile.
at::Tensor tensor_argument(PyObject* object, const char* op);

// The same for a list or tuple of tensors; false if one of them must take the dispatcher's way.
bool tensors_argument(PyObject* sequence, std::vector<at::Tensor>& tensors, const char* op);

// NotImplementedError if one of the objects is a tensor with a tangent.
void check_no_tangents(PyObject* const* objects, Py_ssize_t count, const char* op);

// False for tensors whose collective goes through the dispatcher: on the meta device, or with a gradient to
// record.
bool starts_here(at::TensorList tensors);

// Null for what is no ProcessGroup.
GroupPtr group_object(PyObject* object);

// A group name or ProcessGroup; everything else is asked of the resolver that Python registered with
// set_group_resolver(): resolver(group, tag, op) -> name or ProcessGroup.
GroupPtr group_argument(PyObject* group, PyObject* tag, const char* op);
void set_group_resolver(PyObject* resolver);

// "sum" or ReduceOp.SUM.
c10d::ReduceOp reduce_op_argument(PyObject* reduce_op, const char* op);

int64_t int_argument(PyObject* value, const char* name, const char* op);

// A list or tuple of ints; None gives an empty list.
std::vector<int64_t> ints_argument(PyObject* values, const char* name, const char* op);

// split_sizes=None or a list, as the functions and as the ops take it.
class SplitSizes {
 public:
  SplitSizes(PyObject* values, const char* op);
  bool given() const { return given_; }
  at::OptionalIntArrayRef ints() const;
  at::OptionalSymIntArrayRef symints() const;

 private:
  bool given_;
  std::vector<int64_t> sizes_;
};

}  // namespace funcol::python
