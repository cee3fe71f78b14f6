// Plans between meshes.
#include <pybind11/operators.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "planner/mesh_change.h"
#include "pyobjects/layouts.h"
#include "pyobjects/without_gil.h"
#include "transfer/dtensors/cross_mesh.h"

namespace funcol::python {
namespace {

using Models = std::optional<std::pair<CostModel, CostModel>>;

std::optional<MeshChangeCosts> costs(const Models& models) {
  return models.has_value() ? std::optional(MeshChangeCosts{models->first, models->second}) : std::nullopt;
}

// Returns a mesh with the ranks that the caller gives it, or with a DeviceMesh's own.
RankedMesh ranked(py::handle mesh, const std::optional<std::vector<int64_t>>& ranks) {
  return ranks.has_value() ? RankedMesh{to_mesh(mesh), *ranks} : to_ranked_mesh(mesh);
}

MeshChange mesh_change_plan(py::handle src, py::handle dst,
                            std::pair<py::object, std::optional<std::vector<int64_t>>> mesh,
                            std::pair<py::object, std::optional<std::vector<int64_t>>> to_mesh,
                            std::vector<int64_t> shape, int64_t itemsize, py::handle src_order,
                            py::handle dst_order, const Models& models, std::optional<int64_t> max_bytes) {
  const auto num_dims = static_cast<int64_t>(shape.size());
  MeshChangeTask task{ranked(mesh.first, mesh.second),
                      {},
                      ranked(to_mesh.first, to_mesh.second),
                      {},
                      std::move(shape),
                      itemsize};
  constexpr auto kOp = "plan_mesh_change";
  task.src = layout_argument(kOp, "src", src, src_order, task.src_mesh.mesh, num_dims);
  task.dst = layout_argument(kOp, "dst", dst, dst_order, task.dst_mesh.mesh, num_dims);
  const WithoutGil no_gil;
  return plan_mesh_change(task,
                          costs(models).value_or(MeshChangeCosts{default_alpha_beta(task.src_mesh.mesh),
                                                                 default_alpha_beta(task.dst_mesh.mesh)}),
                          max_bytes);
}

py::tuple matrix_of(const std::vector<std::vector<int64_t>>& rows) {
  py::list list;
  for (const auto& row : rows) {
    list.append(tuple_of(row));
  }
  return py::tuple(list);
}

py::object held(const Transfer& transfer, int64_t rank) {
  const auto& task = transfer.task;
  const auto indices = indices_at(task.src_mesh, task.src, task.shape, rank);
  return indices.has_value() ? py::object(pairs_of(*indices)) : py::none();
}

TransferMessages messages(const Transfer& transfer, std::optional<int64_t> rank) {
  const WithoutGil no_gil;
  return rank.has_value() ? messages_of(transfer.task, *rank) : all_messages(transfer.task);
}

void bind_transfer(py::module m) {
  py::class_<TransferMessage>(m, "TransferMessage")
      .def_readonly("sender", &TransferMessage::sender)
      .def_readonly("receiver", &TransferMessage::receiver)
      .def_property_readonly("indices", [](const TransferMessage& self) { return pairs_of(self.indices); })
      .def_readonly("begin", &TransferMessage::begin)
      .def_readonly("size", &TransferMessage::size)
      .def(py::self == py::self);
  py::class_<Transfer>(m, "Transfer")
      .def_property_readonly("src", [](const Transfer& self) { return to_string(self.task.src); })
      .def_property_readonly("dst", [](const Transfer& self) { return to_string(self.task.dst); })
      .def_property_readonly("total", [](const Transfer& self) { return self.loads.total; })
      .def_property_readonly("busiest_sender", [](const Transfer& self) { return self.loads.busiest_sender; })
      .def_property_readonly("bound", [](const Transfer& self) { return self.loads.bound; })
      .def_property_readonly("messages", [](const Transfer& self) { return messages(self, {}).sent; })
      .def_property_readonly("kept", [](const Transfer& self) { return messages(self, {}).kept; })
      .def(
          "messages_of", [](const Transfer& self, int64_t rank) { return messages(self, rank).sent; },
          py::arg("rank"))
      .def("held", held, py::arg("rank"))
      .def("__str__", [](const Transfer& self) { return to_string(self); })
      .def(py::self == py::self);
}

void bind_plan(py::module m) {
  py::class_<MeshChange>(m, "MeshChange")
      .def_readonly("before", &MeshChange::before)
      .def_readonly("transfer", &MeshChange::transfer)
      .def_readonly("after", &MeshChange::after)
      .def_property_readonly("is_on_common_mesh",
                             [](const MeshChange& self) { return self.common.has_value(); })
      .def_property_readonly("src_mesh", [](const MeshChange& self) { return self.task.src_mesh.mesh; })
      .def_property_readonly("dst_mesh", [](const MeshChange& self) { return self.task.dst_mesh.mesh; })
      .def_property_readonly("src_ranks",
                             [](const MeshChange& self) { return tuple_of(self.task.src_mesh.ranks); })
      .def_property_readonly("dst_ranks",
                             [](const MeshChange& self) { return tuple_of(self.task.dst_mesh.ranks); })
      .def_property_readonly("ranks", [](const MeshChange& self) { return tuple_of(all_ranks(self.task)); })
      .def_property_readonly("src", [](const MeshChange& self) { return to_string(self.task.src); })
      .def_property_readonly("dst", [](const MeshChange& self) { return to_string(self.task.dst); })
      .def_property_readonly("shape", [](const MeshChange& self) { return tuple_of(self.task.shape); })
      .def_property_readonly("itemsize", [](const MeshChange& self) { return self.task.itemsize; })
      .def_readonly("cost", &MeshChange::cost)
      .def_readonly("peak_bytes", &MeshChange::peak_bytes)
      .def_property_readonly("bytes", [](const MeshChange& self) { return matrix_of(bytes_matrix(self)); })
      .def_property_readonly("bound", [](const MeshChange& self) { return least_busiest_bytes(self.task); })
      .def("as_transfer",
           [](const MeshChange& self) {
             return self.transfer.has_value() ? *self.transfer : plan_transfer(self.task);
           })
      .def("__str__", [](const MeshChange& self) { return to_string(self); })
      .def(
          "__repr__",
          [](const MeshChange& self) { return "<funcol.redistribution.MeshChange " + to_string(self) + ">"; })
      .def(py::self == py::self);
  m.def("plan_mesh_change", mesh_change_plan, py::arg("src"), py::arg("dst"), py::arg("mesh"),
        py::arg("to_mesh"), py::arg("shape"), py::arg("itemsize"), py::arg("src_order"), py::arg("dst_order"),
        py::arg("models"), py::arg("max_bytes"));
}

}  // namespace

void bind_mesh_changes(py::module m) {
  bind_transfer(m);
  bind_plan(m);
}

}  // namespace funcol::python
