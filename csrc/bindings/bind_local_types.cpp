// Bindings for the package spmd_types: changes of local types, as its collectives make them, and checks of
// types that are remembered. NotImplemented where the package's own function has to run.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/fast_functions.h"
#include "ops/spmd_types.h"
#include "pyobjects/arguments.h"
#include "pyobjects/checked_types.h"
#include "pyobjects/dtypes.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

constexpr auto kOp = "change_local_type";

local_types::Placed placed_argument(PyObject* type, PyObject* dim) {
  return {static_cast<local_types::Type>(int_argument(type, "type", kOp)), int_argument(dim, "dim", kOp)};
}

// (input, from, from_dim, to, to_dim, group, keeps_input, scatters_dim_first, and dtypes: during, after, and
// for the gradient)
PyObject* change_local_type(PyObject*, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 12, kOp);
  const auto group = group_object(args[5]);
  if (!THPVariable_Check(args[0]) || group == nullptr || has_function_mode()) {
    return not_implemented();
  }
  const auto input = tensor_argument(args[0], kOp);
  if (!input.defined()) {
    return not_implemented();
  }
  const local_types::Change change{placed_argument(args[1], args[2]),
                                   placed_argument(args[3], args[4]),
                                   {to_optional_dtype(args[8], kOp), to_optional_dtype(args[9], kOp)},
                                   {to_optional_dtype(args[10], kOp), to_optional_dtype(args[11], kOp)},
                                   /*scatters_dim_first=*/args[7] == Py_True};
  if (!local_types::takes(input, change, *group)) {
    return not_implemented();
  }
  at::Tensor result;
  {
    const WithoutGil no_gil;
    result = local_types::make(input, change, group, /*keeps_input=*/args[6] == Py_True);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

// The fields of TypeChecker, in order; none end it.
PyObject* set_checker(PyObject*, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto argument = [&](size_t i) { return py::reinterpret_borrow<py::object>(args[i]); };
  if (count == 0) {
    set_type_checker({});
  } else {
    check_count(count, 7, "set_type_checker");
    set_type_checker(
        {argument(0), argument(1), argument(2), argument(3), argument(4), argument(5), argument(6)});
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

void bind_local_types(py::module m) {
  static PyMethodDef functions[] = {
      fast<change_local_type>("change_local_type"),
      fast<set_checker>("set_type_checker"),
      forwarded<check_types, "check_types">(),
      forwarded<assert_type, "assert_type">(),
      {},
  };
  add_functions(m, functions);
  m.def("num_checked_types", num_checked_types);
}

}  // namespace funcol::python
