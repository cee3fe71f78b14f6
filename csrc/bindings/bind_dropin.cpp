// What funcol.install() and the legacy operators need of C++. The GIL is kept throughout; see ops/dropin.h.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "comm/process_group.h"
#include "ops/dropin.h"
#include "ops/legacy.h"

namespace funcol::python {
namespace {

void set_resolver(py::function resolver) {
  // Never freed: operators may still run when the interpreter has gone.
  auto* const kept = std::make_unique<py::function>(std::move(resolver)).release();
  set_ranks_resolver([kept](const std::vector<int64_t>& ranks, const std::string& tag) {
    const py::gil_scoped_acquire gil;
    return (*kept)(ranks, tag).cast<std::optional<std::string>>();
  });
}

}  // namespace

void bind_dropin(PyObject* module) {
  auto m = py::reinterpret_borrow<py::module>(module);
  m.def("set_ranks_resolver", set_resolver);
  m.def("define_missing_legacy_ops", define_missing_legacy_ops);
  m.def("put_under_core_ops", put_under_core_ops);
  m.def("take_from_core_ops", take_from_core_ops);
  m.def("ops_under_dropin", ops_under_dropin);
}

}  // namespace funcol::python
