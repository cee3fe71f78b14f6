#include "sharding/output_sharding.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <utility>

#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "pyobjects/specs.h"

namespace funcol::python {
namespace {

// All placements of a decision with this mask are one object: an input's placement fills its buffer, an
// output's applies it.
py::object to_python_mask(const IndexMask& mask) {
  const auto shape = imported<"torch", "Size">()(py::cast(mask.shape));
  return imported<kPlacementTypes, "_MaskPartial">()(py::arg("offset_shape") = shape,
                                                     py::arg("offset_dim") = mask.dim);
}

py::object masked_placement(const PythonSchema& schema, const Placement& placement,
                            const MaskObjects& masks) {
  if (auto known = masks.find(placement.mask)) {
    return known;
  }
  for (const auto& tensor : schema.tensors) {
    for (const auto& object : tensor.spec.attr("placements")) {
      if (to_placement(object) == placement) {
        return py::reinterpret_borrow<py::object>(object);
      }
    }
  }
  throw std::logic_error("funcol: a mask that no tensor has");
}

py::object python_spec(const PythonSchema& schema, const Spec& spec, py::handle mesh,
                       const MaskObjects& masks) {
  return to_python_spec(spec, mesh, schema.strided_as_order, [&](const Placement& placement) {
    return masked_placement(schema, placement, masks);
  });
}

// A copy of an input's spec if the output's is equal, as it mostly is.
py::object output_spec(const PythonSchema& schema, const Part& part, const Spec& output,
                       const MaskObjects& masks) {
  for (size_t i = 0; i < part.tensors.size(); ++i) {
    const auto& tensor = schema.tensors[part.tensors[i]];
    if (part.schema.layouts[i] == output.layout && part.schema.call.tensors[i] == output.meta &&
        tensor.mesh.is(part.mesh)) {
      return copy_spec(tensor.spec);
    }
  }
  return python_spec(schema, output, part.mesh, masks);
}

}  // namespace

py::tuple decided_specs(const PythonSchema& schema, const Part& part, const OutputSharding& sharding,
                        MaskObjects masks) {
  for (size_t number = 0; number < sharding.masks.size(); ++number) {
    masks.add(new_mask(number), to_python_mask(sharding.masks[number]));
  }
  py::list outputs;
  for (const auto& output : sharding.outputs) {
    outputs.append(output.has_value() ? output_spec(schema, part, *output, masks) : py::none());
  }
  py::list inputs;
  for (size_t i = 0; i < sharding.inputs.size(); ++i) {
    const auto& tensor = schema.tensors[part.tensors[i]];
    const bool stays = sharding.inputs[i] == part.schema.layouts[i];
    inputs.append(
        stays ? copy_spec(tensor.spec)
              : python_spec(schema, {part.schema.call.tensors[i], sharding.inputs[i]}, part.mesh, masks));
  }
  return py::make_tuple(std::move(outputs), std::move(inputs), py::cast(sharding.costs),
                        sharding.needs_redistribute);
}

py::tuple with_own_outputs(const py::tuple& decided) {
  py::list outputs;
  for (const auto& output : decided[0]) {
    outputs.append(output.is_none() ? py::none() : copy_spec(output));
  }
  return py::make_tuple(std::move(outputs), decided[1], decided[2], decided[3]);
}

}  // namespace funcol::python
