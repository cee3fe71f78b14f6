// Collectives in flight, for Python: the list, their callers, and dumps at signals.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "async/in_flight.h"
#include "async/pending_dump.h"
#include "bindings/bindings.h"
#include "comm/call_site.h"
#include "comm/group_ref.h"
#include "compat/process_group.h"
#include "layout/tables.h"
#include "pyobjects/arguments.h"
#include "pyobjects/meshes.h"
#include "pyobjects/python_stack.h"
#include "pyobjects/tensors.h"

namespace funcol::python {
namespace {

std::optional<std::string> as_optional(const Text& text) {
  return text == nullptr ? std::nullopt : std::optional(*text);
}

py::list shapes_of(const InFlight& collective) {
  py::list shapes;
  for (const auto& shape : collective.shapes) {
    shapes.append(py::tuple(py::cast(shape)));
  }
  return shapes;
}

std::vector<InFlight> in_flight() {
  const py::gil_scoped_release no_gil;
  return collectives_in_flight(QueriedWorks::kAll);
}

void begin_recording_callers(bool enabled) {
  set_find_caller(find_caller);
  record_callers(enabled);
}

// Sets the current module, such as "layers.0"; None leaves all modules. Returns the earlier name, or None.
std::optional<std::string> enter_module(std::optional<std::string> name) {
  return as_optional(
      set_current_module(name.has_value() ? std::make_shared<const std::string>(*std::move(name)) : nullptr));
}

GroupEnd end_named(const std::string& end) {
  return end == "abort" ? GroupEnd::kAborted : GroupEnd::kReconfigured;
}

// Notes the end of a group or backend. `end` is "abort" or "reconfigure", PyTorch's names of the methods.
void note_end(py::handle group_or_backend, const std::string& end) {
  if (const auto group = group_object(group_or_backend.ptr())) {
    note_group_ended(group, end_named(end));
  } else {
    note_backend_ended(*group_or_backend.cast<c10::intrusive_ptr<c10d::Backend>>(), end_named(end));
  }
  clear_tables();  // decisions on meshes whose groups may have other ranks now
}

void check_mesh_group(py::handle mesh, const std::string& name, const std::string& op) {
  const auto group = group_moment() > 0 ? compat::registered_group(name) : GroupPtr();
  if (group) {
    check_is_current(GroupRef(group, mesh_moment(mesh)), op.c_str());
  }
}

}  // namespace

void bind_in_flight(py::module m) {
  py::class_<InFlight>(m, "InFlight")
      .def_property_readonly("op", [](const InFlight& self) { return std::string(self.op); })
      .def_property_readonly("group", [](const InFlight& self) { return self.group.name(); })
      .def_property_readonly("shapes", shapes_of)
      .def_property_readonly(
          "dtype",
          [](const InFlight& self) { return self.dtype.has_value() ? to_python(*self.dtype) : py::none(); })
      .def_property_readonly("seconds", [](const InFlight& self) { return self.started.seconds(); })
      .def_property_readonly("caller", [](const InFlight& self) { return as_optional(self.started.caller); })
      .def_property_readonly("purpose",
                             [](const InFlight& self) { return as_optional(self.started.purpose); })
      .def("__str__", &InFlight::text)
      .def("__repr__", [](const InFlight& self) { return "<" + self.text() + ">"; });
  m.def("collectives_in_flight", in_flight);
  m.def("in_flight_text", [] { return in_flight_text(in_flight()); });
  m.def("record_callers", begin_recording_callers);
  m.def("set_library_folders", set_library_folders);
  m.def("enter_module", enter_module);
  m.def("dump_in_flight_on", dump_in_flight_on, py::call_guard<py::gil_scoped_release>());
  m.def("stop_dumping_in_flight_on", stop_dumping_in_flight_on, py::call_guard<py::gil_scoped_release>());
  m.def("follow_fork_of_dumps", follow_fork_of_dumps, py::call_guard<py::gil_scoped_release>());
  m.def("note_group_ended", note_end);
  m.def("note_mesh", note_mesh);
  m.def("check_mesh_group", check_mesh_group);
}

}  // namespace funcol::python
