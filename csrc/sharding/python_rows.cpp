#include "sharding/python_rows.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>

#include "layout/shards.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {
namespace {

// Returns true if the inputs of averages over ranks are cut evenly: only then is such an average that of the
// full tensor. Rules in Python do not check this.
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

Placement read_cell(py::handle cell, Placement (*read)(py::handle), MaskObjects& masks) {
  if (std::string_view(type_name(cell)) == "_ShardingPlaceholder") {
    return any_shard(attribute<"dim">(cell).cast<int64_t>());
  }
  const auto placement = read(cell);
  if (placement.mask != 0) {
    masks.add(placement.mask, py::reinterpret_borrow<py::object>(cell));
  }
  return placement;
}

void check_row(const py::sequence& cells, const OpCall& call) {
  const auto num_inputs = call.tensors.size();
  const auto num_outputs = call.outputs.size();
  TORCH_CHECK_VALUE(cells.size() == num_outputs + num_inputs, "funcol::", kPropagateOpSharding,
                    ": a rule of ", call.op, " gave a row of ", cells.size(), " placements. Expected ",
                    num_outputs, " for its outputs and then ", num_inputs, " for its tensor arguments.");
  for (size_t i = 0; i < num_inputs; ++i) {
    TORCH_CHECK_VALUE(!py::object(cells[num_outputs + i]).is_none(), "funcol::", kPropagateOpSharding,
                      ": a rule of ", call.op, " gave no placement for its tensor argument ", i, ".");
  }
}

}  // namespace

std::optional<Row> read_row(const py::sequence& cells, size_t num_outputs, Placement (*read)(py::handle),
                            MaskObjects& masks) {
  Row row;
  for (size_t i = 0; i < cells.size(); ++i) {
    const py::object cell = cells[i];
    if (i < num_outputs) {
      row.outputs.push_back(cell.is_none() ? std::nullopt : std::optional(read_cell(cell, read, masks)));
    } else if (cell.is_none()) {
      return std::nullopt;
    } else {
      row.inputs.push_back(read_cell(cell, read, masks));
    }
  }
  return row;
}

std::optional<Rows> python_rows(py::handle op_schema, const OpSchema& schema, py::handle rows_of,
                                MaskObjects& masks) {
  const py::object answer = rows_of(op_schema);
  if (answer.is_none()) {
    return std::nullopt;
  }
  Rows rows;
  rows.is_legal = averages_are_even;
  for (const auto& row : answer) {
    const auto cells = row.cast<py::sequence>();
    check_row(cells, schema.call);
    rows.rows.push_back(*read_row(cells, schema.call.outputs.size(), to_placement, masks));
  }
  return rows;
}

}  // namespace funcol::python
