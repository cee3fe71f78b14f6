#include "sharding/call_decisions.h"

#include <c10/core/DefaultDtype.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "propagation/argument_words.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "pyobjects/meshes.h"
#include "pyobjects/specs.h"

namespace funcol::python {
namespace {

// Adds a number's sign instead of its value.
void add_sign(WordKey& key, const Argument& argument) {
  if (argument.is_tensor() || std::holds_alternative<bool>(argument.value)) {
    return add_number(key, argument);
  }
  const double number = argument.number();
  std::isfinite(number) ? key.add((number > 0 ? 1 : 0) | (number < 0 ? 2 : 0)) : add_number(key, argument);
}

// Returns true for a factor: its kind decides the dtype of the result, its sign whether an order is kept.
// Partial sums do not commute with factors that are not finite.
bool is_factor(std::string_view argument) {
  constexpr std::array<std::string_view, 5> kFactors = {"other", "scalar", "scalars", "alpha", "beta"};
  return std::ranges::find(kFactors, argument) != kFactors.end();
}

void add_call(WordKey& key, const OpCall& call, const std::vector<Layout>& layouts,
              const std::vector<std::optional<Layout>>& results, bool with_factors) {
  for (const auto& [name, argument] : call.args) {
    const bool with_value = with_factors || !is_factor(name);
    add_argument(key, argument,
                 [&](const Argument& leaf) { with_value ? add_number(key, leaf) : add_sign(key, leaf); });
  }
  for (size_t i = 0; i < layouts.size(); ++i) {
    key.add(call.tensors[i]);
    key.add(layouts[i]);
  }
  for (const auto& result : results) {
    key.add(result ? 1 : 0);
    if (result) {
      key.add(*result);
    }
  }
}

// Returns for each sub-schema the number of the first one that equals it.
std::vector<size_t> first_equal(const std::vector<SubSchema>& sub_schemas) {
  std::map<std::vector<uint64_t>, size_t> first;
  std::vector<size_t> like;
  for (const auto& [schema, mesh, tensors] : sub_schemas) {
    WordKey key{{reinterpret_cast<uintptr_t>(mesh.ptr())}};
    key.add_all(schema.is_pinned);
    add_call(key, schema.call, schema.layouts, schema.results, /*with_factors=*/true);
    like.push_back(first.try_emplace(std::move(key.words), like.size()).first->second);
  }
  return like;
}

// Makes the one object for all placements of a decision with this mask: an input's placement fills its
// buffer, an output's applies it.
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

// Returns an output's spec: a copy of an input's if they are equal, as they mostly are.
py::object output_spec(const PythonSchema& schema, const SubSchema& sub_schema, const Spec& output,
                       const MaskObjects& masks) {
  for (size_t i = 0; i < sub_schema.tensors.size(); ++i) {
    const auto& tensor = schema.tensors[sub_schema.tensors[i]];
    if (sub_schema.schema.layouts[i] == output.layout && sub_schema.schema.call.tensors[i] == output.meta &&
        tensor.mesh.is(sub_schema.mesh)) {
      return copy_spec(tensor.spec);
    }
  }
  return python_spec(schema, output, sub_schema.mesh, masks);
}

}  // namespace

py::tuple decided_specs(const PythonSchema& schema, const SubSchema& sub_schema,
                        const OutputSharding& sharding, MaskObjects masks) {
  for (size_t number = 0; number < sharding.masks.size(); ++number) {
    masks.add(new_mask(number), to_python_mask(sharding.masks[number]));
  }
  py::list outputs;
  for (const auto& output : sharding.outputs) {
    outputs.append(output.has_value() ? output_spec(schema, sub_schema, *output, masks) : py::none());
  }
  py::list inputs;
  for (size_t i = 0; i < sharding.inputs.size(); ++i) {
    const auto& tensor = schema.tensors[sub_schema.tensors[i]];
    const bool is_unmoved = sharding.inputs[i] == sub_schema.schema.layouts[i];
    inputs.append(is_unmoved ? copy_spec(tensor.spec)
                             : python_spec(schema, {sub_schema.schema.call.tensors[i], sharding.inputs[i]},
                                           sub_schema.mesh, masks));
  }
  return py::make_tuple(std::move(outputs), std::move(inputs), py::cast(sharding.costs),
                        sharding.needs_redistribute);
}

namespace {

// Returns the same decision for another element of the operator's lists, with its own specs of outputs.
py::tuple with_own_outputs(const py::tuple& decided) {
  py::list outputs;
  for (const auto& output : decided[0]) {
    outputs.append(output.is_none() ? py::none() : copy_spec(output));
  }
  return py::make_tuple(std::move(outputs), decided[1], decided[2], decided[3]);
}

}  // namespace

WordKey decision_key(const PythonSchema& schema, bool has_rule) {
  WordKey key{{reinterpret_cast<uintptr_t>(schema.op), value_of_mesh(schema.mesh),
               static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 1 |
                   (schema.strided_as_order ? 1 : 0)}};
  key.add_all(to_mesh(schema.mesh).merged);
  const bool is_one_mesh =
      std::ranges::all_of(schema.tensors, [&](const auto& tensor) { return tensor.mesh.is(schema.mesh); });
  key.add(is_one_mesh ? 1 : 0);
  for (size_t i = 0; !is_one_mesh && i < schema.tensors.size(); ++i) {
    key.add(value_of_mesh(schema.tensors[i].mesh));
  }
  add_call(key, schema.call, schema.layouts, schema.results, /*with_factors=*/!has_rule);
  return key;
}

std::optional<Reason> CallDecisions::decide(const Decide& decide_sub_schema) {
  first_equal_ = first_equal(sub_schemas_);
  for (size_t i = 0; i < sub_schemas_.size(); ++i) {
    auto& decision = decisions_.emplace_back();
    if (first_equal_[i] != i) {
      continue;
    }
    auto found =
        decide_sub_schema(sub_schemas_[i], schema_.op->is_per_element ? py::cast(i) : py::object(py::none()));
    if (auto* const reason = std::get_if<Reason>(&found)) {
      return std::move(*reason);
    }
    decision = std::get<SubDecision>(std::move(found));
  }
  return std::nullopt;
}

py::list CallDecisions::specs() const {
  py::list specs;
  for (size_t i = 0; i < decisions_.size(); ++i) {
    const auto& [sharding, masks] = decisions_[i];
    specs.append(first_equal_[i] == i ? decided_specs(schema_, sub_schemas_[i], sharding, masks)
                                      : with_own_outputs(specs[first_equal_[i]].cast<py::tuple>()));
  }
  return specs;
}

std::optional<CallDecision> CallDecisions::values() const {
  CallDecision decision{{}, schema_.layouts, false};
  for (size_t i = 0; i < decisions_.size(); ++i) {
    const auto& [sharding, masks] = decisions_[first_equal_[i]];
    if (!masks.empty() || !sharding.masks.empty()) {
      return std::nullopt;
    }
    for (size_t k = 0; k < sub_schemas_[i].tensors.size(); ++k) {
      decision.inputs[sub_schemas_[i].tensors[k]] = sharding.inputs[k];
    }
    decision.outputs.insert(decision.outputs.end(), sharding.outputs.begin(), sharding.outputs.end());
    decision.moves = decision.moves || sharding.needs_redistribute;
  }
  return decision;
}

}  // namespace funcol::python
