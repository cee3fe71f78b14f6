// Plans of redistributions, and the cost models that they are compared by.
#include <pybind11/operators.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "layout/shards.h"
#include "planner/flattening.h"
#include "planner/search.h"
#include "pyobjects/layouts.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

Redistribution redistribution(const char* op, py::handle src, py::handle dst, py::handle mesh,
                              std::vector<int64_t> shape, int64_t itemsize, py::handle src_order,
                              py::handle dst_order) {
  const auto num_dims = static_cast<int64_t>(shape.size());
  Redistribution task{to_mesh(mesh), std::move(shape), itemsize, {}, {}};
  task.src = layout_argument(op, "src", src, src_order, task.mesh, num_dims);
  task.dst = layout_argument(op, "dst", dst, dst_order, task.mesh, num_dims);
  return task;
}

CostModel model_or_default(std::optional<CostModel> model, const Mesh& mesh) {
  return model.has_value() ? *std::move(model) : default_alpha_beta(mesh);
}

Plan plan(py::handle src, py::handle dst, py::handle mesh, std::vector<int64_t> shape, int64_t itemsize,
          py::handle src_order, py::handle dst_order, std::optional<CostModel> model,
          std::optional<int64_t> max_bytes) {
  const auto task =
      redistribution("plan_redistribution", src, dst, mesh, std::move(shape), itemsize, src_order, dst_order);
  const WithoutGil no_gil;
  return plan_redistribution(task, model_or_default(std::move(model), task.mesh), max_bytes);
}

Plan greedy_plan(py::handle src, py::handle dst, py::handle mesh, std::vector<int64_t> shape,
                 int64_t itemsize, py::handle src_order, py::handle dst_order,
                 std::optional<CostModel> model) {
  const auto task = redistribution("greedy_redistribution", src, dst, mesh, std::move(shape), itemsize,
                                   src_order, dst_order);
  const WithoutGil no_gil;
  return greedy_redistribution(task, model_or_default(std::move(model), task.mesh));
}

py::tuple axes_of(const Step& step, const Mesh& mesh) {
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    if (contains(step.axes, axis)) {
      axes.push_back(axis);
    }
  }
  return tuple_of(axes);
}

// A step, and the mesh of its axes.
struct StepOfPlan {
  Step step;
  Mesh mesh;

  friend bool operator==(const StepOfPlan&, const StepOfPlan&) = default;
};

std::vector<StepOfPlan> steps_of(const Plan& plan) {
  std::vector<StepOfPlan> steps;
  steps.reserve(plan.steps.size());
  for (const auto& step : plan.steps) {
    steps.push_back({step, plan.mesh});
  }
  return steps;
}

const Layout& layout_after(const Plan& plan, size_t num_steps) {
  if (num_steps > plan.steps.size()) {
    throw std::invalid_argument("Plan.local_indices: " + std::to_string(num_steps) + " steps of a plan of " +
                                std::to_string(plan.steps.size()) + ".");
  }
  return num_steps == 0 ? plan.src : plan.steps[num_steps - 1].after;
}

py::tuple local_indices_after(const Plan& plan, size_t num_steps, const Coordinate& coordinate) {
  const auto& layout = layout_after(plan, num_steps);
  bool inside = coordinate.size() == plan.mesh.sizes.size();
  for (size_t axis = 0; inside && axis < coordinate.size(); ++axis) {
    inside = coordinate[axis] >= 0 && coordinate[axis] < plan.mesh.sizes[axis];
  }
  if (!inside) {
    throw std::invalid_argument(
        "Plan.local_indices: the mesh has no rank at this coordinate. Give an index below "
        "the size of each of its " +
        std::to_string(plan.mesh.num_axes()) + " axes.");
  }
  std::vector<Intervals> indices;
  for (size_t dim = 0; dim < plan.shape.size(); ++dim) {
    indices.push_back(
        local_indices(layout, plan.mesh, static_cast<int64_t>(dim), plan.shape[dim], coordinate));
  }
  return pairs_of(indices);
}

std::string repr(const Plan& plan) {
  return "<funcol.redistribution.Plan " + to_string(plan) + ", " + std::to_string(plan.steps.size()) +
         " steps, cost " + std::string(py::str(py::float_(plan.cost))) + ">";
}

void bind_mesh(py::module m) {
  py::class_<Mesh>(m, "Mesh")
      .def(py::init(
               [](std::vector<int64_t> sizes, std::vector<std::string> names, std::vector<AxisSet> merged) {
                 return Mesh{std::move(sizes), std::move(names), std::move(merged)};
               }),
           py::arg("sizes"), py::arg("names"), py::arg("merged"))
      .def_property_readonly("sizes", [](const Mesh& mesh) { return tuple_of(mesh.sizes); })
      .def_property_readonly("names", [](const Mesh& mesh) { return py::tuple(py::cast(mesh.names)); })
      .def_property_readonly("merged", [](const Mesh& mesh) { return py::tuple(py::cast(mesh.merged)); })
      .def(py::self == py::self);
  m.def("mesh_of", [](py::handle mesh) { return to_mesh(mesh); });
}

void bind_cost_models(py::module m) {
  py::class_<StepCounts>(m, "StepCounts")
      .def(py::init<>())
      .def("__repr__", [](const StepCounts&) { return "StepCounts()"; })
      .def(py::pickle([](const StepCounts&) { return py::tuple(); },
                      [](const py::tuple&) { return StepCounts{}; }))
      .def(py::self == py::self);
  py::class_<LinkCost>(m, "LinkCost")
      .def(py::init<double, double>(), py::arg("latency_us") = 0.0, py::arg("us_per_byte") = 0.0)
      .def_readonly("latency_us", &LinkCost::latency_us)
      .def_readonly("us_per_byte", &LinkCost::us_per_byte)
      .def(py::self == py::self);
  py::class_<AxisCost>(m, "AxisCost")
      .def(py::init<LinkCost, LinkCost, LinkCost, LinkCost, LinkCost>(), py::arg("all_gather"),
           py::arg("reduce_scatter"), py::arg("all_reduce"), py::arg("all_to_all"), py::arg("permute"))
      .def_readonly("all_gather", &AxisCost::all_gather)
      .def_readonly("reduce_scatter", &AxisCost::reduce_scatter)
      .def_readonly("all_reduce", &AxisCost::all_reduce)
      .def_readonly("all_to_all", &AxisCost::all_to_all)
      .def_readonly("permute", &AxisCost::permute)
      .def(py::self == py::self);
  py::class_<DTensorCosts>(m, "DTensorCosts").def(py::init<>()).def("__repr__", [](const DTensorCosts&) {
    return "DTensorCosts()";
  });
  py::class_<AlphaBeta>(m, "AlphaBeta")
      .def(py::init([](std::vector<AxisCost> axes, LinkCost copy) {
             return AlphaBeta{std::move(axes), copy};
           }),
           py::arg("axes"), py::arg("copy"))
      .def_property_readonly("axes", [](const AlphaBeta& model) { return py::tuple(py::cast(model.axes)); })
      .def_readonly("copy", &AlphaBeta::copy)
      .def(py::self == py::self);
  m.def("default_alpha_beta", [](py::handle mesh) { return default_alpha_beta(to_mesh(mesh)); });
}

void bind_plans(py::module m) {
  py::class_<StepOfPlan>(m, "Step")
      .def_property_readonly("kind",
                             [](const StepOfPlan& self) { return std::string(to_string(self.step.kind)); })
      .def_property_readonly("axes", [](const StepOfPlan& self) { return axes_of(self.step, self.mesh); })
      .def_property_readonly("before", [](const StepOfPlan& self) { return to_string(self.step.before); })
      .def_property_readonly("after", [](const StepOfPlan& self) { return to_string(self.step.after); })
      .def_property_readonly("logical_shape",
                             [](const StepOfPlan& self) { return tuple_of(self.step.logical_shape); })
      .def_property_readonly("cost", [](const StepOfPlan& self) { return self.step.cost; })
      .def_property_readonly("bytes_sent", [](const StepOfPlan& self) { return self.step.bytes_sent; })
      .def_property_readonly("peak_bytes", [](const StepOfPlan& self) { return self.step.peak_bytes; })
      .def("__str__", [](const StepOfPlan& self) { return to_string(self.step, self.mesh); })
      .def("__repr__",
           [](const StepOfPlan& self) {
             return "<funcol.redistribution.Step " + to_string(self.step, self.mesh) + ">";
           })
      .def("__hash__",
           [](const StepOfPlan& self) { return std::hash<std::string>{}(to_string(self.step, self.mesh)); })
      .def(py::self == py::self);
  py::class_<Plan>(m, "Plan")
      .def_readonly("mesh", &Plan::mesh)
      .def_property_readonly("steps", [](const Plan& plan) { return py::tuple(py::cast(steps_of(plan))); })
      .def_readonly("cost", &Plan::cost)
      .def_readonly("peak_bytes", &Plan::peak_bytes)
      .def_readonly("itemsize", &Plan::itemsize)
      .def_property_readonly("shape", [](const Plan& plan) { return tuple_of(plan.shape); })
      .def_property_readonly("src", [](const Plan& plan) { return to_string(plan.src); })
      .def_property_readonly("dst", [](const Plan& plan) { return to_string(plan.dst); })
      .def_property_readonly("hint", flattening_hint)
      .def("local_indices", local_indices_after, py::arg("num_steps"), py::arg("coordinate"))
      .def("__str__", [](const Plan& plan) { return to_string(plan); })
      .def("__repr__", repr)
      .def("__hash__", [](const Plan& plan) { return std::hash<std::string>{}(to_string(plan)); })
      .def(py::self == py::self);
  m.def("plan_redistribution", plan, py::arg("src"), py::arg("dst"), py::arg("mesh"), py::arg("shape"),
        py::arg("itemsize"), py::arg("src_order"), py::arg("dst_order"), py::arg("model"),
        py::arg("max_bytes"));
  m.def("greedy_redistribution", greedy_plan, py::arg("src"), py::arg("dst"), py::arg("mesh"),
        py::arg("shape"), py::arg("itemsize"), py::arg("src_order"), py::arg("dst_order"), py::arg("model"));
}

}  // namespace

py::tuple pairs_of(const std::vector<Intervals>& indices) {
  py::list dims;
  for (const auto& intervals : indices) {
    py::list pairs;
    for (const auto& interval : intervals) {
      pairs.append(py::make_tuple(interval.begin, interval.size));
    }
    dims.append(py::tuple(pairs));
  }
  return py::tuple(dims);
}

Layout layout_argument(const char* op, const char* side, py::handle placements, py::handle order,
                       const Mesh& mesh, int64_t num_dims) {
  return make_layout(std::string(op) + ": " + side, to_placements(placements), to_shard_order(order), mesh,
                     num_dims);
}

void bind_planner(py::module m) {
  bind_mesh(m);
  bind_cost_models(m);
  bind_plans(m);
}

}  // namespace funcol::python
