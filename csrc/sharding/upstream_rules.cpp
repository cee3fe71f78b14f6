#include "sharding/upstream_rules.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "compat/dtensor_spec.h"
#include "metas/output_metas.h"
#include "propagation/argument_words.h"
#include "propagation/upstream_search.h"
#include "propagation/upstream_views.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "sharding/local_sizes.h"

namespace funcol::python {
namespace {

UpstreamRule read_axis_rule(const py::tuple& fields) {
  auto rule = std::make_shared<AxisRule>();
  rule->num_inputs = fields[1].cast<size_t>();
  for (const auto& given : fields[0]) {
    const auto cells = given.cast<py::sequence>();
    const auto num_outputs = cells.size() - rule->num_inputs;
    auto row = cells.size() < rule->num_inputs
                   ? std::nullopt
                   : read_row(cells, num_outputs, to_placement_or_norm, rule->masks);
    if (!row || (!rule->rows.empty() && num_outputs != rule->rows[0].outputs.size())) {
      return {kRefused};
    }
    rule->rows.push_back(*std::move(row));
  }
  rule->allows_uneven = fields[3].cast<bool>();
  rule->other_mesh_inputs = fields[4].cast<std::vector<size_t>>();
  rule->even_dims = fields[5].cast<std::vector<size_t>>();
  if (!fields[6].is_none()) {
    rule->accepts = fields[6];
  }
  return {std::move(rule), fields[2].cast<std::vector<int64_t>>()};
}

std::vector<Placement> read_placements(py::handle placements) {
  std::vector<Placement> read;
  for (const auto& placement : placements) {
    read.push_back(to_placement_or_norm(placement));
  }
  return read;
}

UpstreamRule read_rule(const py::object& rule) {
  if (PyUnicode_Check(rule.ptr())) {
    return {rule.cast<Reason>()};
  }
  const auto fields = rule.cast<py::tuple>();
  if (fields.size() != 2) {
    return read_axis_rule(fields);
  }
  MeshRule mesh_rule{{}, read_placements(fields[1])};
  for (const auto& placements : fields[0]) {
    mesh_rule.inputs.push_back(read_placements(placements));
  }
  return {std::move(mesh_rule)};
}

// Returns true if a rule does arithmetic with sizes: it has as many outputs as parts.
bool counts_sizes(std::string_view op) {
  constexpr std::array<std::string_view, 4> kOps = {"aten::split.Tensor", "aten::unbind.int",
                                                    "aten::unsafe_split.Tensor", "aten::chunk"};
  return std::ranges::find(kOps, op) != kOps.end();
}

// The writer of a rule's key: of all that the rule may depend on.
class RuleWords {
 public:
  // Writes the sizes of tensors if `with_sizes`; else which of them are 0, 1 or equal, and where they stand
  // among the integers of the call.
  RuleWords(const PythonSchema& schema, const SubSchema& sub_schema, bool with_sizes)
      : schema_(schema), call_(sub_schema.schema.call), with_sizes_(with_sizes) {}

  WordKey write(py::handle op_overload, PyObject* info) {
    for (const auto& [name, argument] : call_.args) {
      note_integers(argument);
    }
    std::ranges::sort(integers_);
    key_.add(reinterpret_cast<uintptr_t>(op_overload.ptr()));
    key_.add(reinterpret_cast<uintptr_t>(info));
    key_.add(schema_.num_positional << 1 | (schema_.lists_operands ? 1 : 0));
    for (const auto& [name, argument] : call_.args) {
      add(argument);
    }
    for (const auto& keyword : schema_.keywords) {
      add_text(key_.words, keyword.name);
      if (keyword.out) {
        add(keyword.out->meta);
      }
    }
    return std::move(key_);
  }

 private:
  static uint64_t magnitude(int64_t number) {
    return number < 0 ? -static_cast<uint64_t>(number) : static_cast<uint64_t>(number);
  }

  void note_integers(const Argument& argument) {
    if (const auto* const number = std::get_if<int64_t>(&argument.value)) {
      integers_.push_back(magnitude(*number));
    } else if (argument.is_list()) {
      std::ranges::for_each(argument.list(), [&](const auto& element) { note_integers(element); });
    }
  }

  void add_size(uint64_t size) {
    if (with_sizes_ || size <= 1) {
      key_.add(size);
      return;
    }
    const auto known = std::ranges::find(sizes_, size);
    key_.add(2 + static_cast<uint64_t>(known - sizes_.begin()));
    if (known != sizes_.end()) {
      return;
    }
    sizes_.push_back(size);
    const auto place = std::ranges::lower_bound(integers_, size);
    const bool is_integer = place != integers_.end() && *place == size;
    key_.add(static_cast<uint64_t>(place - integers_.begin()) << 1 | (is_integer ? 1 : 0));
  }

  void add(const Argument& argument) {
    add_argument(key_, argument, [&](const Argument& leaf) {
      leaf.is_tensor() ? add(call_.tensors[leaf.tensor()]) : add_number(key_, leaf);
    });
  }

  void add(const TensorMeta& meta) {
    key_.add(static_cast<uint64_t>(meta.dtype) << 32 | meta.shape.size());
    for (const int64_t size : meta.shape) {
      add_size(static_cast<uint64_t>(size));
    }
    if (with_sizes_) {
      key_.add_all(meta.stride);
    }
  }

  const PythonSchema& schema_;
  const OpCall& call_;
  bool with_sizes_;
  std::vector<uint64_t> integers_;  // of the call, without their signs, in order
  std::vector<uint64_t> sizes_;     // above 1, in order of appearance
  WordKey key_;
};

// Calls `visit` with the placements of each tensor of `sub_schema`, and of those to write to.
template <typename Visit>
void for_each_placement(const PythonSchema& schema, const SubSchema& sub_schema, const Visit& visit) {
  for (const auto& layout : sub_schema.schema.layouts) {
    std::ranges::for_each(layout.placements, visit);
  }
  for (const auto& keyword : schema.keywords) {
    if (keyword.out) {
      std::ranges::for_each(keyword.out->layout.placements, visit);
    }
  }
}

std::optional<MeshRule> mesh_rule_of_view(SubSchema& sub_schema) {
  auto& call = sub_schema.schema.call;
  if (sub_schema.schema.layouts.size() != 1 || !fill_outputs(call)) {
    return std::nullopt;
  }
  const auto& layout = sub_schema.schema.layouts[0];
  auto output = upstream_view(call, layout, sub_schema.schema.mesh);
  return output ? std::optional(MeshRule{{layout.placements}, *std::move(output)}) : std::nullopt;
}

}  // namespace

bool fill_outputs(OpCall& call) {
  if (!call.outputs.empty()) {
    return true;
  }
  try {
    call.outputs = output_metas(call);
    return true;
  } catch (const c10::Error&) {
  } catch (python_error&) {
  } catch (py::error_already_set&) {
  }
  return false;
}

size_t UpstreamRules::Remembered::heap_bytes() const {
  size_t bytes = sizeof(AxisRule) + 2 * kBlockBytes + rule->rows.capacity() * sizeof(Row);
  for (const auto& row : rule->rows) {
    bytes += row.inputs.capacity() * sizeof(Placement) + row.outputs.capacity() * sizeof row.outputs[0] +
             2 * kBlockBytes;
  }
  return bytes;
}

template <AttributeName name>
PyObject* UpstreamRules::entry(py::handle op_overload) const {
  const auto table = find_attribute<name>(base_);
  return table ? find_entry(table, op_overload) : nullptr;
}

template <AttributeName name>
PyObject* UpstreamRules::own_entry(py::handle op_overload) const {
  auto* const table = PyDict_GetItemWithError(own_.ptr(), interned<name>());
  return table == nullptr ? nullptr : find_entry(table, op_overload);
}

bool UpstreamRules::decides(py::handle op_overload) const {
  const bool has_rule = entry<"op_to_rules">(op_overload) != nullptr ||
                        entry<"op_strategy_funcs">(op_overload) != nullptr ||
                        entry<"op_single_dim_strategy_funcs">(op_overload) != nullptr;
  return has_rule && find_entry(replaced_, op_overload) == nullptr &&
         to_operator(op_overload).name != "aten::_local_scalar_dense" &&
         ((entry<"op_to_shape_and_stride_idx">(op_overload) == nullptr &&
           entry<"op_to_scalar_shape_adjuster">(op_overload) == nullptr) ||
          local_size_places(op_overload).has_value());
}

bool UpstreamRules::is_in_cpp(py::handle op_overload) const {
  const auto is_own = [&]<AttributeName name>() {
    return entry<name>(op_overload) == own_entry<name>(op_overload);
  };
  const auto& op = to_operator(op_overload);
  return find_rule(op.name) != nullptr &&
         !op.handle.hasTag(at::Tag::inplace_view) &&  // which changes its tensor's geometry
         is_own.operator()<"op_to_rules">() && is_own.operator()<"op_strategy_funcs">() &&
         is_own.operator()<"op_single_dim_strategy_funcs">();
}

UpstreamRule UpstreamRules::rule_of(py::handle op_overload, const PythonSchema& schema, SubSchema& sub_schema,
                                    const std::function<py::object()>& query_rule) {
  bool has_shards = false;
  bool has_strided = false;
  for_each_placement(schema, sub_schema, [&](const Placement& placement) {
    has_shards = has_shards || placement.is_shard();
    has_strided = has_strided || (placement.is_shard() && placement.is_strided());
  });
  auto* const info = entry<"op_single_dim_strategy_funcs">(op_overload);
  if (info == nullptr) {
    auto* const strategy = entry<"op_strategy_funcs">(op_overload);
    if (strategy != nullptr && strategy == own_entry<"op_strategy_funcs">(op_overload)) {
      if (auto mesh_rule = mesh_rule_of_view(sub_schema)) {
        return {*std::move(mesh_rule)};
      }
    }
    return read_rule(query_rule());
  }
  if (has_strided) {  // Python orders the split factors
    return read_rule(query_rule());
  }
  const bool is_own = info == own_entry<"op_single_dim_strategy_funcs">(op_overload);
  auto key = RuleWords(schema, sub_schema, !is_own || counts_sizes(schema.op->name)).write(op_overload, info);
  if (const auto* const known = known_.find(key)) {
    return {known->rule, has_shards ? std::vector<int64_t>{1} : std::vector<int64_t>{}};
  }
  const auto held = py::reinterpret_borrow<py::object>(info);
  auto found = read_rule(query_rule());
  const auto* const rule = std::get_if<std::shared_ptr<const AxisRule>>(&found.rule);
  // A filter belongs to one call, and each call has masks of its own.
  if (rule != nullptr && !(*rule)->accepts && (*rule)->masks.empty()) {
    known_.insert_if_admitted(std::move(key), {*rule, held});
  }
  return found;
}

namespace {

// A builder of the question for a sub-schema, whose tensors it lists as PyTorch does.
class UpstreamQuestionBuilder {
 public:
  UpstreamQuestionBuilder(const PythonSchema& schema, const SubSchema& sub_schema)
      : schema_(schema), sub_schema_(sub_schema) {
    const auto& args = sub_schema.schema.call.args;
    const bool takes_lists = !schema.op->is_per_element && schema.lists_operands;
    for (size_t i = 0; i < std::min(schema.num_positional, args.size()); ++i) {
      add_positional(args[i].second, takes_lists);
    }
    std::ranges::for_each(schema.keywords, [&](const auto& keyword) { add_keyword(keyword); });
    require_outs();
  }

  UpstreamQuestion& question() { return question_; }

  // Returns the sub-schema's tensors in the order of the operands; nullopt for an out= tensor.
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
      add(sub_schema_.schema.call.arg(keyword.name).tensor(), false);
      return;
    }
    add_operand({keyword.out->meta, keyword.out->layout, keyword.strided_as_order, false, false});
    numbers_.emplace_back(std::nullopt);
  }

  void require_outs() {
    for (const auto& argument : schema_.op->handle.schema().arguments()) {
      if (!argument.is_out()) {
        continue;
      }
      const auto given = std::ranges::find(schema_.keywords, argument.name(), &KeywordTensor::name);
      question_.required.push_back(
          given == schema_.keywords.end() ? std::nullopt : std::optional(given->out->layout.placements));
    }
  }

  void add(size_t number, bool is_positional) {
    const auto& [spec, mesh] = schema_.tensors[sub_schema_.tensors[number]];
    add_operand({sub_schema_.schema.call.tensors[number], sub_schema_.schema.layouts[number],
                 compat::strided_shards_represent_shard_order(spec), is_positional,
                 !mesh.is(sub_schema_.mesh) && !mesh.equal(sub_schema_.mesh)});
    numbers_.emplace_back(number);
  }

  // Adds an operand. Strided shards in rows mean what those of the first tensor that has any mean.
  void add_operand(UpstreamOperand operand) {
    if (has_strided_shards(operand.source) && !has_strided_) {
      has_strided_ = true;
      question_.strided_as_order = operand.strided_as_order;
    }
    question_.operands.push_back(std::move(operand));
  }

  const PythonSchema& schema_;
  const SubSchema& sub_schema_;
  UpstreamQuestion question_;
  bool has_strided_ = false;
  std::vector<std::optional<size_t>> numbers_;
};

Layout in_mesh_order(std::vector<Placement> placements) {
  auto order = default_shard_order(placements);
  return {std::move(placements), std::move(order)};
}

// Returns the decision with these rows on the mesh axes. Keyword tensors stay where they are, as in PyTorch.
OutputSharding sharding_of(const SubSchema& sub_schema, const UpstreamQuestion& question,
                           const std::vector<std::optional<size_t>>& numbers, const std::vector<Row>& rows,
                           const std::vector<double>& costs) {
  const auto& call = sub_schema.schema.call;
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
  sharding.inputs = sub_schema.schema.layouts;
  sharding.costs.resize(call.tensors.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto& operand = question.operands[i];
    if (!numbers[i] || !operand.is_positional || operand.is_on_other_mesh) {
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
bool set_rule(const UpstreamRule& given, const AxisRule& rule, const SubSchema& sub_schema,
              UpstreamQuestion& question) {
  question.rows = rule.rows;
  question.num_outputs =
      rule.rows.empty() ? sub_schema.schema.call.outputs.size() : rule.rows[0].outputs.size();
  question.split_factors = given.split_factors;
  question.allows_uneven = rule.allows_uneven;
  for (size_t i = 0; i < question.operands.size(); ++i) {
    if (question.operands[i].is_on_other_mesh &&
        std::ranges::find(rule.other_mesh_inputs, i) == rule.other_mesh_inputs.end()) {
      return false;
    }
  }
  return rule.num_inputs == question.operands.size();
}

// Decides by the rule of all mesh axes, which allows one composition.
std::variant<OutputSharding, Reason> mesh_rule_choice(const SubSchema& sub_schema,
                                                      UpstreamQuestionBuilder& builder,
                                                      const MeshRule& mesh_rule) {
  auto& question = builder.question();
  if (mesh_rule.inputs.size() != question.operands.size() || sub_schema.schema.call.outputs.size() != 1) {
    return kRefused;
  }
  std::vector<Row> rows;
  for (size_t axis = 0; axis < mesh_rule.output.size(); ++axis) {
    auto& row = rows.emplace_back();
    row.outputs.emplace_back(mesh_rule.output[axis]);
    for (const auto& placements : mesh_rule.inputs) {
      row.inputs.push_back(placements.at(axis));
    }
  }
  question.num_outputs = 1;
  return sharding_of(sub_schema, question, builder.numbers(), rows, {});
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

std::variant<OutputSharding, Reason> pytorchs_choice(const PythonSchema& schema, const SubSchema& sub_schema,
                                                     const UpstreamRule& given) {
  UpstreamQuestionBuilder builder(schema, sub_schema);
  if (const auto* const mesh_rule = std::get_if<MeshRule>(&given.rule)) {
    return mesh_rule_choice(sub_schema, builder, *mesh_rule);
  }
  const auto& rule = *std::get<std::shared_ptr<const AxisRule>>(given.rule);
  auto& question = builder.question();
  if (question.operands.empty() || !set_rule(given, rule, sub_schema, question)) {
    return kRefused;
  }
  const auto& outputs = sub_schema.schema.call.outputs;
  question.mesh = sub_schema.schema.mesh;
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
      const auto specs = decided_specs(
          schema, sub_schema, sharding_of(sub_schema, question, builder.numbers(), rows, {}), rule.masks);
      return rule.accepts(specs[1], specs[0]).cast<bool>();
    };
  }
  const auto choice = upstream_choice(question);
  if (!choice) {
    return kRefused;
  }
  return sharding_of(sub_schema, question, builder.numbers(), choice->rows, choice->costs);
}

}  // namespace funcol::python
