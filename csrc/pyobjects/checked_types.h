// Results of the type checker of spmd_types, remembered by call.
//
// The package's checker is a torch function mode in Python: it infers the types of each call's results from
// the types of its arguments, in some 300 us a call. Its answer depends only on values that are cheap to
// compare, so that an equal call gets the same types from here. The package checks calls with anything that
// is not compared: other classes of tensors, arguments without a value. Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>

namespace funcol::python {

// Parts of the package, which Python registers once.
struct TypeChecker {
  py::object mode;     // the class of the function mode
  py::object check;    // the mode's own __torch_function__
  py::object recheck;  // check() of a call that has returned already
  py::object kind;     // (function) -> CallKind
  py::object getters;  // the set of descriptors whose attributes are computed, such as Tensor.T
  py::object threads;  // the thread-local object whose mesh_stack holds the current mesh
  py::object mesh;     // (an entry of the stack) -> the number of its value
};

// Starts to remember calls, from an empty memory. An empty checker stops it.
void set_type_checker(TypeChecker checker);

// Returns true for a mode of the package that is disabled, as by FSDP2 around its own work: it leaves every
// call unchecked.
bool is_idle_type_checker(PyObject* mode);

// Does the work of the mode's __torch_function__. `kwargs` may be None.
py::object check_types(py::handle mode, py::handle func, py::handle types, py::handle args,
                       py::handle kwargs);

// Does the work of spmd_types.assert_type(tensor, *types, **options); `own` is the package's function.
// Returns null if the caller has to call it.
py::object assert_type(py::handle own, py::handle tensor, py::handle types, py::handle options);

// Returns the number of remembered calls.
size_t num_checked_types();

}  // namespace funcol::python
