// Python arguments of the collectives, converted to values.
//
// The cost of these calls is counted in microseconds, so they bypass pybind11's overload machinery.
// Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <vector>

#include "comm/group_ref.h"
#include "comm/reduce_op.h"

namespace funcol::python {

// Returns true if a torch function mode is active on this thread. The mode that only sets the device of new
// tensors does not count, nor does a disabled type checker.
bool has_function_mode();

// Returns true if a mode, transform or tracer of PyTorch is active on this thread.
bool is_observed();

// Returns the tensor of a Python object; null for subclasses, tensors of a mode or transform, and other
// objects.
const at::Tensor* plain_tensor(PyObject* object);

// Returns a plain tensor; an undefined one if the call has to go through the dispatcher, where subclasses,
// modes and transforms take part. Raises TypeError for other objects. The result is a reference taken with
// the GIL, so that torch.utils.swap_tensors cannot replace the tensor later.
at::Tensor tensor_argument(PyObject* object, const char* op);

// Raises TypeError naming `op` if `object` is a DTensor, which collectives do not take.
void refuse_dtensor(PyObject* object, const char* op);

// Reads the tensors of a list or tuple. Returns false if the call has to go through the dispatcher.
bool tensors_argument(PyObject* sequence, std::vector<at::Tensor>& tensors, const char* op);

// Raises NotImplementedError if one of the objects is a tensor with a tangent.
void check_no_tangents(PyObject* const* objects, Py_ssize_t count, const char* op);

// Returns true if a collective on these tensors may start without the dispatcher: none is on the meta device
// or has a gradient to record.
bool can_bypass_dispatcher(at::TensorList tensors);

// Returns true if all of `tensors` are on the meta device and `group` is a name that no group of this process
// has. Only PyTorch's operators handle such calls: they find the result's shape without the group.
bool is_shape_only(at::TensorList tensors, PyObject* group);

// Returns the ProcessGroup of a Python object; null for other objects.
GroupPtr group_object(PyObject* object);

// Returns the group of a name or a ProcessGroup. Python's resolver(group, tag, op) converts other objects to
// one of the two.
GroupPtr group_argument(PyObject* group, PyObject* tag, const char* op);
void set_group_resolver(PyObject* resolver);

// Returns the reduce operator of a name, such as "sum", or of a ReduceOp.
c10d::ReduceOp reduce_op_argument(PyObject* reduce_op, const char* op);

int64_t int_argument(PyObject* value, const char* name, const char* op);

// Returns the ints of a list or tuple; an empty vector for None.
std::vector<int64_t> ints_argument(PyObject* values, const char* name, const char* op);

// The argument split_sizes, None or a list, in the forms that C++ functions and operators take.
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
