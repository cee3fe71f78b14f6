#include "sharding/python_strategies.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "layout/shards.h"
#include "pyobjects/layouts.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {
namespace {

// An average over ranks is that of the whole tensor only if all ranks hold equally much, which rules in
// Python do not check.
bool averages_are_even(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    const bool averages = std::ranges::any_of(composition.outputs, [&](const auto& output) {
      return output.has_value() && output->placements[axis].is_partial() &&
             output->placements[axis].op == PartialOp::kAvg;
    });
    for (size_t i = 0; averages && i < composition.inputs.size(); ++i) {
      const auto& layout = composition.inputs[i];
      const auto& placement = layout.placements[axis];
      if (placement.is_shard() &&
          !is_cut_evenly(layout, mesh, placement.dim, call.tensors[i].shape[placement.dim])) {
        return false;
      }
    }
  }
  return true;
}

Row to_row(const py::sequence& placements, const OpCall& call, MaskObjects& masks) {
  const auto num_inputs = call.tensors.size();
  const auto num_outputs = call.outputs.size();
  TORCH_CHECK_VALUE(placements.size() == num_outputs + num_inputs, "funcol::", kPropagateOpSharding,
                    ": a rule of ", call.op, " gave a row of ", placements.size(), " placements. Expected ",
                    num_outputs, " for its outputs and then ", num_inputs, " for its tensor arguments.");
  Row row;
  for (size_t i = 0; i < placements.size(); ++i) {
    const py::object placement = placements[i];
    if (i < num_outputs) {
      row.outputs.push_back(placement.is_none() ? std::nullopt
                                                : std::optional(read_cell(placement, to_placement, masks)));
    } else {
      TORCH_CHECK_VALUE(!placement.is_none(), "funcol::", kPropagateOpSharding, ": a rule of ", call.op,
                        " gave no placement for its tensor argument ", i - num_outputs, ".");
      row.inputs.push_back(read_cell(placement, to_placement, masks));
    }
  }
  return row;
}

}  // namespace

std::optional<Rows> python_rows(py::handle op_schema, const OpSchema& schema, py::handle rows_of,
                                MaskObjects& masks) {
  const py::object answer = rows_of(op_schema);
  if (answer.is_none()) {
    return std::nullopt;
  }
  Rows rows;
  rows.is_legal = averages_are_even;
  for (const auto& row : answer) {
    rows.rows.push_back(to_row(row.cast<py::sequence>(), schema.call, masks));
  }
  return rows;
}

}  // namespace funcol::python
