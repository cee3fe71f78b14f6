// The decisions of ShardingEngine that are PyTorch's own.
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "metas/output_metas.h"
#include "propagation/rule.h"
#include "propagation/upstream_plans.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "sharding/foreach_dedup.h"
#include "sharding/output_sharding.h"
#include "sharding/sharding_engine.h"
#include "sharding/upstream_strategies.h"

namespace funcol::python {
namespace {

// Returns true if C++ has prices for PyTorch's plans: the mesh has at most kMostAxes axes, or all tensors
// have the default shard order and no strided shards.
bool has_prices(const PythonSchema& schema) {
  return attribute<"ndim">(schema.mesh).cast<size_t>() <= UpstreamPlans::kMostAxes ||
         std::ranges::all_of(schema.layouts, [](const Layout& layout) {
           return is_default(layout.order) && !has_strided_shards(layout);
         });
}

// Returns true if rules in C++ support the layouts: no norms, and only partials that commute.
bool knows_layout(const Layout& layout) {
  const auto& placements = layout.placements;
  return std::ranges::all_of(placements, [&](const Placement& a) {
    return !a.is_partial() || (!a.is_norm() && std::ranges::all_of(placements, [&](const Placement& b) {
      return !b.is_partial() || commute(a, b);
    }));
  });
}

bool fill_outputs(OpCall& call) {
  try {
    call.outputs = output_metas(call);
    return true;
  } catch (const c10::Error&) {
  } catch (python_error&) {
  } catch (py::error_already_set&) {
  }
  return false;
}

}  // namespace

py::object ShardingEngine::propagate_as_pytorch(py::handle op_schema, py::handle rule_of,
                                                py::handle otherwise, py::handle assemble, bool has_rule,
                                                bool remember) {
  PythonSchema schema;
  try {
    schema = read_op_schema(op_schema, moves_keywords_, Reading::kAsPyTorch);
  } catch (const c10::Error&) {
    return otherwise(op_schema, "value");
  }
  return remembered(op_schema, schema, has_rule, remember, [&]() -> py::object {
    return has_prices(schema) ? decide_as_pytorch(op_schema, schema, rule_of, otherwise, assemble, has_rule)
                              : otherwise(op_schema, "axes");
  });
}

py::object ShardingEngine::decide_as_pytorch(py::handle op_schema, const PythonSchema& schema,
                                             py::handle rule_of, py::handle otherwise, py::handle assemble,
                                             bool has_rule) {
  py::list elements;
  std::vector<Part> parts;
  try {
    parts = parts_of(schema);
  } catch (const c10::ValueError&) {  // tensors of several meshes
    return otherwise(op_schema, "refused");
  }
  AlikeParts decided(parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (const auto same = decided.added_like(i)) {
      elements.append(with_own_outputs(elements[*same].cast<py::tuple>()));
      continue;
    }
    const auto rule = rule_of(op_schema, schema.op->is_per_element ? py::cast(i) : py::object(py::none()));
    if (PyUnicode_Check(rule.ptr())) {
      return otherwise(op_schema, rule);
    }
    auto element = part_as_pytorch(op_schema, schema, parts[i], rule, has_rule);
    if (const auto* reason = std::get_if<Reason>(&element)) {
      return otherwise(op_schema, *reason);
    }
    elements.append(std::get<py::tuple>(element));
    decided.add(i);
  }
  return assemble(op_schema, elements);
}

std::variant<py::tuple, Reason> ShardingEngine::part_as_pytorch(py::handle op_schema,
                                                                const PythonSchema& schema, Part& part,
                                                                py::handle rule, bool has_rule) {
  if (!fill_outputs(part.schema.call)) {
    return "metas";
  }
  MaskObjects masks;
  auto choice = pytorchs_choice(op_schema, schema, part, rule, masks);
  if (auto* const reason = std::get_if<Reason>(&choice)) {
    return std::move(*reason);
  }
  auto& sharding = std::get<OutputSharding>(choice);
  const auto* const own = has_rule ? find_rule(part.schema.call.op) : nullptr;
  if (own == nullptr || !std::ranges::all_of(part.schema.layouts, knows_layout) ||
      !std::ranges::all_of(sharding.inputs, knows_layout)) {
    return decided_specs(schema, part, sharding, masks);
  }
  add_written_outputs(part.schema);
  for (const size_t number : part.schema.written) {
    sharding.outputs.emplace_back(Spec{part.schema.call.tensors[number], sharding.inputs[number]});
  }
  try {
    const auto rows = (*own)(part.schema.call);
    if (propagator_.allows(part.schema, rows, sharding)) {
      return decided_specs(schema, part, sharding, masks);
    }
    return decided_specs(schema, part, propagator_.propagate(part.schema, rows), {});
  } catch (const std::invalid_argument&) {
    return "write";
  }
}

}  // namespace funcol::python
