#include "sharding/upstream_strategies.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "compat/dtensor_spec.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "sharding/output_sharding.h"

namespace funcol::python {
namespace {

constexpr const char* kRefused = "refused";

bool is_placeholder(py::handle cell) { return std::string_view(type_name(cell)) == "_ShardingPlaceholder"; }

Placement to_cell(py::handle cell, MaskObjects& masks) {
  if (is_placeholder(cell)) {
    return any_shard(attribute<"dim">(cell).cast<int64_t>());
  }
  const auto placement = to_placement_or_norm(cell);
  if (placement.mask != 0) {
    masks.add(placement.mask, py::reinterpret_borrow<py::object>(cell));
  }
  return placement;
}

// A row of Python: placements of outputs, then of `num_inputs` tensors, all of which have one.
std::optional<Row> to_row(const py::sequence& cells, size_t num_inputs, MaskObjects& masks) {
  Row row;
  if (cells.size() < num_inputs) {
    return std::nullopt;
  }
  const auto num_outputs = cells.size() - num_inputs;
  for (size_t i = 0; i < cells.size(); ++i) {
    const py::object cell = cells[i];
    if (i >= num_outputs && cell.is_none()) {
      return std::nullopt;
    }
    if (i >= num_outputs) {
      row.inputs.push_back(to_cell(cell, masks));
    } else {
      row.outputs.push_back(cell.is_none() ? std::nullopt : std::optional(to_cell(cell, masks)));
    }
  }
  return row;
}

bool needs_pytree(py::handle op_schema) {
  const auto info = attribute<"schema_info">(op_schema);
  return !info.is_none() && attribute<"needs_pytree">(info).is(py::handle(Py_True));
}

// A part of a call as PyTorch lists its tensors.
class PyTorchPart {
 public:
  PyTorchPart(py::handle op_schema, const PythonSchema& whole, const Part& part)
      : whole_(whole), part_(part) {
    const auto num_args = attribute<"args_schema">(op_schema).cast<py::sequence>().size();
    const auto& args = part.schema.call.args;
    const bool takes_lists = !whole.op->is_per_element && needs_pytree(op_schema);
    for (size_t i = 0; i < std::min(num_args, args.size()); ++i) {
      add_positional(args[i].second, takes_lists);
    }
    add_keywords(attribute<"kwargs_schema">(op_schema).cast<py::dict>());
  }

  UpstreamQuestion& question() { return question_; }

  // The part's tensors in the order of the operands; nothing for an out= tensor.
  const std::vector<std::optional<size_t>>& numbers() const { return numbers_; }

 private:
  void add_positional(const Argument& argument, bool takes_lists) {
    if (argument.is_tensor()) {
      add(argument.tensor(), true);
    } else if (argument.is_list() && takes_lists) {
      for (const auto& element : argument.list()) {
        add_positional(element, true);
      }
    }
  }

  void add_keywords(const py::dict& keywords) {
    for (const auto& [name, value] : keywords) {
      if (!is_spec(value)) {
        continue;
      }
      const auto key = name.cast<std::string>();
      if (part_.schema.call.has_arg(key)) {
        add(part_.schema.call.arg(key).tensor(), false);
        continue;
      }
      const auto spec = read_spec_as_pytorch(value);
      add_operand({spec.meta, spec.layout, compat::strided_shards_stand_for_order(value), false, false});
      numbers_.emplace_back(std::nullopt);
    }
    require_outs(keywords);
  }

  void require_outs(const py::dict& keywords) {
    for (const auto& argument : whole_.op->handle.schema().arguments()) {
      if (!argument.is_out()) {
        continue;
      }
      auto* const value = PyDict_GetItemString(keywords.ptr(), argument.name().c_str());
      question_.required.push_back(value != nullptr && is_spec(value)
                                       ? std::optional(read_spec_as_pytorch(value).layout.placements)
                                       : std::nullopt);
    }
  }

  void add(size_t number, bool is_positional) {
    const auto& [spec, mesh] = whole_.tensors[part_.tensors[number]];
    add_operand({part_.schema.call.tensors[number], part_.schema.layouts[number],
                 compat::strided_shards_stand_for_order(spec), is_positional,
                 !mesh.is(part_.mesh) && !mesh.equal(part_.mesh)});
    numbers_.emplace_back(number);
  }

  // Strided shards in rows stand for what those of the first tensor with strided shards stand for.
  void add_operand(UpstreamOperand operand) {
    if (has_strided_shards(operand.source) && !has_strided_) {
      has_strided_ = true;
      question_.strided_as_order = operand.strided_as_order;
    }
    question_.operands.push_back(std::move(operand));
  }

  const PythonSchema& whole_;
  const Part& part_;
  UpstreamQuestion question_;
  bool has_strided_ = false;
  std::vector<std::optional<size_t>> numbers_;
};

Layout in_mesh_order(std::vector<Placement> placements) {
  auto order = default_shard_order(placements);
  return {std::move(placements), std::move(order)};
}

// The decision with these rows on the mesh axes. Keyword tensors stay where they are, as in PyTorch.
OutputSharding sharding_of(const Part& part, const UpstreamQuestion& question,
                           const std::vector<std::optional<size_t>>& numbers, const std::vector<Row>& rows,
                           const std::vector<double>& costs) {
  const auto& call = part.schema.call;
  OutputSharding sharding;
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    auto& output = sharding.outputs.emplace_back();
    if (call.outputs[i] && i < question.num_outputs && rows.at(0).outputs[i]) {
      std::vector<Placement> placements;
      for (const auto& row : rows) {
        placements.push_back(*row.outputs[i]);
      }
      output = Spec{*call.outputs[i], in_mesh_order(std::move(placements))};
    }
  }
  sharding.inputs = part.schema.layouts;
  sharding.costs.resize(call.tensors.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto& operand = question.operands[i];
    if (!numbers[i] || !operand.is_positional || operand.is_elsewhere) {
      continue;
    }
    std::vector<Placement> placements;
    for (const auto& row : rows) {
      placements.push_back(row.inputs[i]);
    }
    auto layout = in_mesh_order(std::move(placements));
    sharding.needs_redistribute = sharding.needs_redistribute || layout != sharding.inputs[*numbers[i]];
    sharding.inputs[*numbers[i]] = std::move(layout);
    sharding.costs[*numbers[i]] = costs.empty() ? 0 : costs[i];
  }
  return sharding;
}

// Reads an AxisRule into the question. False if PyTorch would raise an error.
bool read_rule(const py::tuple& rule, const Part& part, UpstreamQuestion& question, MaskObjects& masks) {
  const auto num_inputs = rule[1].cast<size_t>();
  question.num_outputs = part.schema.call.outputs.size();
  for (const auto& cells : rule[0]) {
    auto row = to_row(cells.cast<py::sequence>(), num_inputs, masks);
    if (!row || (!question.rows.empty() && row->outputs.size() != question.rows[0].outputs.size())) {
      return false;
    }
    question.num_outputs = row->outputs.size();
    question.rows.push_back(std::move(*row));
  }
  question.split_factors = rule[2].cast<std::vector<int64_t>>();
  question.allows_uneven = rule[3].cast<bool>();
  const auto elsewhere = rule[4].cast<std::vector<size_t>>();
  for (size_t i = 0; i < question.operands.size(); ++i) {
    if (question.operands[i].is_elsewhere && std::ranges::find(elsewhere, i) == elsewhere.end()) {
      return false;
    }
  }
  return num_inputs == question.operands.size();
}

// A decision by the rule of the whole mesh, which gives one way.
std::variant<OutputSharding, Reason> only_way(const Part& part, PyTorchPart& as_listed,
                                              const py::tuple& rule) {
  auto& question = as_listed.question();
  const auto inputs = rule[0].cast<py::sequence>();
  const auto output = rule[1].cast<py::sequence>();
  if (inputs.size() != question.operands.size() || part.schema.call.outputs.size() != 1) {
    return kRefused;
  }
  std::vector<Row> rows;
  for (size_t axis = 0; axis < output.size(); ++axis) {
    auto& row = rows.emplace_back();
    row.outputs.emplace_back(to_placement_or_norm(output[axis]));
    for (const auto& placements : inputs) {
      row.inputs.push_back(to_placement_or_norm(placements.cast<py::sequence>()[axis]));
    }
  }
  question.num_outputs = 1;
  return sharding_of(part, question, as_listed.numbers(), rows, {});
}

}  // namespace

std::variant<OutputSharding, Reason> pytorchs_choice(py::handle op_schema, const PythonSchema& schema,
                                                     const Part& part, py::handle rule, MaskObjects& masks) {
  PyTorchPart as_listed(op_schema, schema, part);
  const auto fields = rule.cast<py::tuple>();
  if (fields.size() == 2) {
    return only_way(part, as_listed, fields);
  }
  auto& question = as_listed.question();
  if (question.operands.empty() || !read_rule(fields, part, question, masks)) {
    return kRefused;
  }
  const auto& outputs = part.schema.call.outputs;
  question.mesh = part.schema.mesh;
  question.is_in_place = !schema.op->is_written.empty() && schema.op->is_written[0];
  question.prefers_unmoved = !schema.op->is_per_element;
  for (size_t i = 0; outputs.size() > 1 && i < outputs.size(); ++i) {
    question.lacks_output.push_back(!outputs[i].has_value());
  }
  const py::object accepts = fields[5];
  if (!accepts.is_none()) {
    question.accepts = [&](const std::vector<Row>& rows) {
      const auto specs =
          decided_specs(schema, part, sharding_of(part, question, as_listed.numbers(), rows, {}), masks);
      return accepts(specs[1], specs[0]).cast<bool>();
    };
  }
  const auto choice = upstream_choice(question);
  if (!choice) {
    return kRefused;
  }
  return sharding_of(part, question, as_listed.numbers(), choice->rows, choice->costs);
}

}  // namespace funcol::python
