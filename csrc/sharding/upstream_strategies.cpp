// PyTorch's choice for a call, by its own rule.
#include <pybind11/stl.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "compat/dtensor_spec.h"
#include "propagation/upstream_search.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "sharding/call_decisions.h"
#include "sharding/upstream_rules.h"

namespace funcol::python {
namespace {

// A part of a call as PyTorch lists its tensors.
class PyTorchPart {
 public:
  PyTorchPart(const PythonSchema& whole, const Part& part) : whole_(whole), part_(part) {
    const auto& args = part.schema.call.args;
    const bool takes_lists = !whole.op->is_per_element && whole.lists_operands;
    for (size_t i = 0; i < std::min(whole.num_positional, args.size()); ++i) {
      add_positional(args[i].second, takes_lists);
    }
    std::ranges::for_each(whole.keywords, [&](const auto& keyword) { add_keyword(keyword); });
    require_outs();
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

  void add_keyword(const KeywordTensor& keyword) {
    if (!keyword.out) {
      add(part_.schema.call.arg(keyword.name).tensor(), false);
      return;
    }
    add_operand({keyword.out->meta, keyword.out->layout, keyword.strided_as_order, false, false});
    numbers_.emplace_back(std::nullopt);
  }

  void require_outs() {
    for (const auto& argument : whole_.op->handle.schema().arguments()) {
      if (!argument.is_out()) {
        continue;
      }
      const auto given = std::ranges::find(whole_.keywords, argument.name(), &KeywordTensor::name);
      question_.required.push_back(
          given == whole_.keywords.end() ? std::nullopt : std::optional(given->out->layout.placements));
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

// Writes a rule into the question. Returns false if PyTorch would raise an error.
bool take_rule(const UpstreamRule& given, const AxisRule& rule, const Part& part,
               UpstreamQuestion& question) {
  question.rows = rule.rows;
  question.num_outputs = rule.rows.empty() ? part.schema.call.outputs.size() : rule.rows[0].outputs.size();
  question.split_factors = given.split_factors;
  question.allows_uneven = rule.allows_uneven;
  for (size_t i = 0; i < question.operands.size(); ++i) {
    if (question.operands[i].is_elsewhere && std::ranges::find(rule.elsewhere, i) == rule.elsewhere.end()) {
      return false;
    }
  }
  return rule.num_inputs == question.operands.size();
}

// A decision by the rule of the whole mesh, which gives one way.
std::variant<OutputSharding, Reason> only_way(const Part& part, PyTorchPart& as_listed, const OnlyWay& way) {
  auto& question = as_listed.question();
  if (way.inputs.size() != question.operands.size() || part.schema.call.outputs.size() != 1) {
    return kRefused;
  }
  std::vector<Row> rows;
  for (size_t axis = 0; axis < way.output.size(); ++axis) {
    auto& row = rows.emplace_back();
    row.outputs.emplace_back(way.output[axis]);
    for (const auto& placements : way.inputs) {
      row.inputs.push_back(placements.at(axis));
    }
  }
  question.num_outputs = 1;
  return sharding_of(part, question, as_listed.numbers(), rows, {});
}

// Returns true if rows on the mesh axes cut these dims of the first tensor into equal parts.
bool cut_evenly(const std::vector<size_t>& dims, const std::vector<Row>& rows,
                const UpstreamQuestion& question) {
  return std::ranges::all_of(dims, [&](size_t dim) {
    int64_t num_parts = 1;
    for (size_t axis = 0; axis < rows.size(); ++axis) {
      const auto& placement = rows[axis].inputs[0];
      if (placement.is_shard() && placement.dim == static_cast<int64_t>(dim)) {
        num_parts *= question.mesh.sizes[axis] * placement.split_factor;
      }
    }
    return question.operands[0].meta.shape[dim] % num_parts == 0;
  });
}

}  // namespace

std::variant<OutputSharding, Reason> pytorchs_choice(const PythonSchema& schema, const Part& part,
                                                     const UpstreamRule& given) {
  PyTorchPart as_listed(schema, part);
  if (const auto* const way = std::get_if<OnlyWay>(&given.rule)) {
    return only_way(part, as_listed, *way);
  }
  const auto& rule = *std::get<std::shared_ptr<const AxisRule>>(given.rule);
  auto& question = as_listed.question();
  if (question.operands.empty() || !take_rule(given, rule, part, question)) {
    return kRefused;
  }
  const auto& outputs = part.schema.call.outputs;
  question.mesh = part.schema.mesh;
  question.is_in_place = !schema.op->is_written.empty() && schema.op->is_written[0];
  question.prefers_unmoved = !schema.op->is_per_element;
  for (size_t i = 0; outputs.size() > 1 && i < outputs.size(); ++i) {
    question.lacks_output.push_back(!outputs[i].has_value());
  }
  if (!rule.even_dims.empty()) {
    question.accepts = [&](const std::vector<Row>& rows) {
      return cut_evenly(rule.even_dims, rows, question);
    };
  } else if (rule.accepts) {
    question.accepts = [&](const std::vector<Row>& rows) {
      const auto specs =
          decided_specs(schema, part, sharding_of(part, question, as_listed.numbers(), rows, {}), rule.masks);
      return rule.accepts(specs[1], specs[0]).cast<bool>();
    };
  }
  const auto choice = upstream_choice(question);
  if (!choice) {
    return kRefused;
  }
  return sharding_of(part, question, as_listed.numbers(), choice->rows, choice->costs);
}

}  // namespace funcol::python
