#include "sharding/sharding_engine.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "metas/output_metas.h"
#include "propagation/rule.h"
#include "propagation/upstream_plans.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"

namespace funcol::python {
namespace {

std::vector<std::optional<TensorMeta>> output_metas_of(const OpCall& call) { return output_metas(call); }

// Returns the rows of a rule in C++. Requires outputs that are filled in; adds the tensors that are written
// to.
Rows rows_by(const Rule& rule, OpSchema& schema) {
  add_written_outputs(schema);
  return rule(schema.call);
}

// Returns the rows of one mesh axis. Returns nullopt if no one-axis rule exists that C++ supports, or if the
// outputs are not known: the operator depends on data, or does not run on Meta tensors. Adds masks of
// Python's rows to `masks`.
std::optional<Rows> rows_for(py::handle op_schema, OpSchema& schema, bool has_rule, py::handle rows_of,
                             MaskObjects& masks) {
  if (!fill_outputs(schema.call)) {
    return std::nullopt;
  }
  if (has_rule) {
    return rows_by(*find_rule(schema.call.op), schema);
  }
  try {
    return python_rows(op_schema, schema, rows_of, masks);
  } catch (const c10::NotImplementedError&) {  // placements with rules of their own
    return std::nullopt;
  }
}

// Returns true if C++ has prices for PyTorch's plans: the mesh has at most kMostAxes axes, or all tensors
// have the default shard order and no strided shards.
bool has_prices(const PythonSchema& schema) {
  return to_mesh(schema.mesh).num_axes() <= static_cast<int64_t>(UpstreamPlans::kMostAxes) ||
         std::ranges::all_of(schema.layouts, [](const Layout& layout) {
           return is_default(layout.order) && !has_strided_shards(layout);
         });
}

// Returns true if rules in C++ support the layouts: no norms, and only partials that commute.
bool supports_layout(const Layout& layout) {
  const auto& placements = layout.placements;
  return std::ranges::all_of(placements, [&](const Placement& a) {
    return !a.is_partial() || (!a.is_norm() && std::ranges::all_of(placements, [&](const Placement& b) {
      return !b.is_partial() || commute(a, b);
    }));
  });
}

// Returns the counts by reason, by OpOverload. The overloads outlive the counts.
std::unordered_map<PyObject*, std::map<std::string, size_t>>& counts() {
  static std::unordered_map<PyObject*, std::map<std::string, size_t>> counts;
  return counts;
}

}  // namespace

ShardingEngine::ShardingEngine(std::optional<CostModel> model, size_t capacity, bool moves_keywords)
    : propagator_(output_metas_of, std::move(model)),
      decisions_(find_table("decisions"), capacity),
      capacity_(capacity),
      moves_keywords_(moves_keywords) {}

py::object ShardingEngine::propagate(py::handle op_schema, py::handle rows_of, py::handle fallback,
                                     py::handle assemble, bool remember) {
  PythonSchema schema;
  try {
    schema = read_op_schema(op_schema, moves_keywords_);
  } catch (const c10::NotImplementedError&) {
    return fallback(op_schema, remember);
  }
  const bool has_rule = has_cpp_rule(*schema.op);
  return remembered(schema, has_rule, remember, [&]() -> py::object {
    CallDecisions decisions(schema);
    using Found = std::variant<SubDecision, Reason>;
    const auto reason = decisions.decide([&](SubSchema& sub_schema, const py::object& /*index*/) -> Found {
      MaskObjects masks;
      const auto rows = rows_for(op_schema, sub_schema.schema, has_rule, rows_of, masks);
      return rows ? Found(SubDecision{propagator_.propagate(sub_schema.schema, *rows), std::move(masks)})
                  : Found("rows");
    });
    return reason ? fallback(op_schema, false) : assemble(op_schema, decisions.specs());
  });
}

py::object ShardingEngine::remembered(const PythonSchema& schema, bool has_rule, bool remember,
                                      const std::function<py::object()>& decide) {
  if (!remember) {
    return decide();
  }
  auto key = decision_key(schema, has_rule);
  if (const auto* const known = decisions_.find(key)) {
    ++num_hits_;
    return known->sharding;
  }
  ++num_misses_;
  auto decided = decide();
  decisions_.insert_if_admitted(std::move(key), {decided});
  return decided;
}

py::object ShardingEngine::propagate_as_pytorch(py::handle op_schema, UpstreamRules& rules,
                                                py::handle rule_of, py::handle otherwise, py::handle assemble,
                                                bool remember) {
  PythonSchema schema;
  try {
    schema = read_op_schema(op_schema, moves_keywords_, Reading::kAsPyTorch);
  } catch (const c10::Error&) {
    return otherwise(op_schema, "value");
  }
  const py::object op = attribute<"op">(op_schema);
  return remembered(schema, rules.is_in_cpp(op), remember, [&]() -> py::object {
    const auto found = decide_as_pytorch(op, schema, rules,
                                         [&](const py::object& index) { return rule_of(op_schema, index); });
    const auto* const decisions = std::get_if<CallDecisions>(&found);
    return decisions == nullptr ? otherwise(op_schema, std::get<Reason>(found))
                                : assemble(op_schema, decisions->specs());
  });
}

std::optional<CallDecision> ShardingEngine::decide_call(py::handle op, const PythonSchema& schema,
                                                        UpstreamRules& rules,
                                                        const QueryRule& query_rule) const {
  const auto found = decide_as_pytorch(op, schema, rules, query_rule);
  const auto* const decisions = std::get_if<CallDecisions>(&found);
  return decisions == nullptr ? std::nullopt : decisions->values();
}

std::variant<CallDecisions, Reason> ShardingEngine::decide_as_pytorch(py::handle op,
                                                                      const PythonSchema& schema,
                                                                      UpstreamRules& rules,
                                                                      const QueryRule& query_rule) const {
  if (!has_prices(schema)) {
    return "axes";
  }
  std::optional<CallDecisions> decisions;
  try {
    decisions.emplace(schema);
  } catch (const c10::ValueError&) {  // tensors of several meshes
    return kRefused;
  }
  const bool has_rule = rules.is_in_cpp(op);
  auto reason = decisions->decide([&](SubSchema& sub_schema, const py::object& index) {
    return follow(rules.rule_of(op, schema, sub_schema, [&] { return query_rule(index); }), schema,
                  sub_schema, has_rule);
  });
  if (reason) {
    return *std::move(reason);
  }
  return *std::move(decisions);
}

std::variant<SubDecision, Reason> ShardingEngine::decide_by(const Rule& rule, SubSchema& sub_schema) const {
  if (!fill_outputs(sub_schema.schema.call)) {
    return kRefused;
  }
  try {
    const auto rows = rows_by(rule, sub_schema.schema);
    return SubDecision{propagator_.propagate(sub_schema.schema, rows)};
  } catch (const std::invalid_argument&) {
    return kRefused;
  }
}

// Follows PyTorch's rule for `sub_schema`. If C++ has a rule, too, C++ decides if PyTorch raises an error,
// and if that rule does not allow PyTorch's choice.
std::variant<SubDecision, Reason> ShardingEngine::follow(const UpstreamRule& rule, const PythonSchema& schema,
                                                         SubSchema& sub_schema, bool has_rule) const {
  const auto* const own = has_rule && std::ranges::all_of(sub_schema.schema.layouts, supports_layout)
                              ? find_rule(sub_schema.schema.call.op)
                              : nullptr;
  auto choice = std::variant<OutputSharding, Reason>(kRefused);
  if (const auto* const reason = std::get_if<Reason>(&rule.rule)) {
    choice = *reason;
  } else if (!fill_outputs(sub_schema.schema.call)) {
    return "metas";
  } else {
    choice = pytorchs_choice(schema, sub_schema, rule);
  }
  if (const auto* const reason = std::get_if<Reason>(&choice)) {
    return *reason == kRefused && own != nullptr ? decide_by(*own, sub_schema) : *reason;
  }
  SubDecision decision{std::get<OutputSharding>(std::move(choice))};
  auto& sharding = decision.sharding;
  if (const auto* const axis_rule = std::get_if<std::shared_ptr<const AxisRule>>(&rule.rule)) {
    decision.masks = (*axis_rule)->masks;
  }
  if (own == nullptr || !std::ranges::all_of(sharding.inputs, supports_layout)) {
    return decision;
  }
  try {
    const auto rows = rows_by(*own, sub_schema.schema);
    for (const size_t number : sub_schema.schema.written) {
      sharding.outputs.emplace_back(Spec{sub_schema.schema.call.tensors[number], sharding.inputs[number]});
    }
    if (!propagator_.allows(sub_schema.schema, rows, sharding)) {
      decision = {propagator_.propagate(sub_schema.schema, rows)};
    }
  } catch (const std::invalid_argument&) {
    return "write";
  }
  return decision;
}

py::object ShardingEngine::strategies(py::handle op_schema, py::handle rows_of) {
  const auto schema = read_op_schema(op_schema, moves_keywords_);
  py::list elements;
  for (auto& sub_schema : sub_schemas_of(schema)) {
    MaskObjects masks;
    const auto rows = rows_for(op_schema, sub_schema.schema, has_cpp_rule(*schema.op), rows_of, masks);
    if (!rows.has_value()) {
      return py::none();
    }
    py::list list;
    for (const auto& sharding : propagator_.strategies(sub_schema.schema, *rows)) {
      list.append(decided_specs(schema, sub_schema, sharding, masks));
    }
    elements.append(std::move(list));
  }
  return elements;  // NOLINT: no move, pybind11 converts
}

double ShardingEngine::time_decision(py::handle op_schema, size_t count) {
  const auto schema = read_op_schema(op_schema, moves_keywords_);
  double best = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < count; ++i) {
    propagator_.forget_costs();
    const auto begin = std::chrono::steady_clock::now();
    for (auto& sub_schema : sub_schemas_of(schema)) {
      propagator_.propagate(sub_schema.schema);
    }
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

void ShardingEngine::disable_rule(const std::string& op) {
  disabled_rules_.insert(op);
  decisions_.clear();
}

void ShardingEngine::clear() {
  decisions_.clear();
  propagator_.forget_costs();
  num_hits_ = num_misses_ = 0;
}

py::tuple ShardingEngine::info() const {
  return py::make_tuple(num_hits_, num_misses_, capacity_, decisions_.size());
}

bool ShardingEngine::has_cpp_rule(const Operator& op) const {
  return disabled_rules_.count(op.name) == 0 && find_rule(op.name) != nullptr;
}

void count_decision(py::handle op_overload, const std::string& reason) {
  to_operator(op_overload);  // keeps the overload
  ++counts()[op_overload.ptr()][reason];
}

std::map<std::string, std::map<std::string, size_t>> decision_counts() {
  std::map<std::string, std::map<std::string, size_t>> by_name;
  for (const auto& [op, of_op] : counts()) {
    by_name[py::str(py::handle(op))] = of_op;
  }
  return by_name;
}

void forget_decision_counts() { counts().clear(); }

}  // namespace funcol::python
