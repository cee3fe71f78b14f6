#include "sharding/cost_table.h"

#include <c10/util/Exception.h>

#include <cstddef>
#include <string>

#include "propagation/propagator.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "pyobjects/op_schemas.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

// A reader of the layouts of specs, all of one tensor.
class SpecsOfATensor {
 public:
  std::vector<Layout> read(const py::sequence& specs) {
    std::vector<Layout> layouts;
    layouts.reserve(specs.size());
    for (const auto& spec : specs) {
      layouts.push_back(is_known_tensor(spec) ? read_layout(spec, meta_, "a tensor") : checked(spec));
    }
    return layouts;
  }

  const Mesh& mesh() const { return to_mesh(mesh_); }
  const TensorMeta& meta() const { return meta_; }
  bool empty() const { return !mesh_; }

 private:
  // Returns true for a spec of the tensor and mesh read first. Compares Python objects, mostly identical.
  bool is_known_tensor(py::handle spec) const {
    if (!mesh_ || !is_spec(spec) || !attribute<"mesh">(spec).is(mesh_)) {
      return false;
    }
    const auto meta = attribute<"tensor_meta">(spec);
    return meta.is(meta_object_) ||
           (PyTuple_Check(meta.ptr()) &&
            PyTuple_GET_SIZE(meta.ptr()) == PyTuple_GET_SIZE(meta_object_.ptr()) &&
            PyTuple_GET_ITEM(meta.ptr(), 2) == PyTuple_GET_ITEM(meta_object_.ptr(), 2) &&
            py::handle(PyTuple_GET_ITEM(meta.ptr(), 0))
                .equal(py::handle(PyTuple_GET_ITEM(meta_object_.ptr(), 0))));
  }

  Layout checked(py::handle spec) {
    auto [meta, layout] = read_spec(spec);
    const auto mesh = attribute<"mesh">(spec);
    if (!mesh_) {
      mesh_ = mesh;
      meta_object_ = attribute<"tensor_meta">(spec);
      meta_ = meta;
    }
    TORCH_CHECK_VALUE(mesh_.equal(mesh) && meta_.shape == meta.shape && meta_.dtype == meta.dtype,
                      "funcol::redistribute_cost_table: specs of different tensors or meshes, ",
                      to_string(meta_), " on ", std::string(py::str(mesh_)), " and ", to_string(meta), " on ",
                      std::string(py::str(mesh)), ". Expected specs of one tensor.");
    return layout;
  }

  py::object mesh_;
  py::object meta_object_;
  TensorMeta meta_;
};

}  // namespace

std::vector<std::vector<double>> redistribute_cost_table(const py::sequence& sources,
                                                         const py::sequence& targets,
                                                         const std::optional<CostModel>& model) {
  SpecsOfATensor specs;
  const auto from = specs.read(sources);
  const auto to = specs.read(targets);
  std::vector<std::vector<double>> table(from.size());
  if (specs.empty()) {
    return table;
  }
  const auto mesh = specs.mesh();
  std::vector<double> costs;
  {
    const WithoutGil no_gil;
    costs = redistribution_costs(from, to, specs.meta(), mesh, model.value_or(default_alpha_beta(mesh)));
  }
  for (size_t row = 0; row < from.size(); ++row) {
    const auto begin = costs.begin() + static_cast<std::ptrdiff_t>(row * to.size());
    table[row].assign(begin, begin + static_cast<std::ptrdiff_t>(to.size()));
  }
  return table;
}

}  // namespace funcol::python
