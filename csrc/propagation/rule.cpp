#include "propagation/rule.h"

#include <algorithm>
#include <array>
#include <set>
#include <stdexcept>
#include <utility>

#include "propagation/rules/rule_table.h"

namespace funcol {
namespace {

constexpr std::string_view kForeach = "aten::_foreach_";

// Returns the functional form's name: "aten::add" for "aten::add_". "aten::__xor__" is functional already.
std::string_view functional_name(std::string_view name) {
  return name.ends_with('_') && !name.ends_with("__") ? name.substr(0, name.size() - 1) : name;
}

void insert(ByName<Rule>& rules, std::string_view name, const Rule& rule) {
  if (!rules.emplace(std::string(name), rule).second) {
    throw std::logic_error("RuleTable: '" + std::string(name) + "' has two rules");
  }
}

// Returns the row after `change` of each of its placements.
template <typename Change>
Row changed(Row row, const Change& change) {
  std::ranges::for_each(row.inputs, change);
  for (auto& output : row.outputs) {
    if (output) {
      change(*output);
    }
  }
  return row;
}

RuleTable make_table() {
  RuleTable table;
  pointwise_rules::add(table);
  copy_rules::add(table);
  matrix_rules::add(table);
  reshape_rules::add(table);
  view_rules::add(table);
  reduction_rules::add(table);
  scan_rules::add(table);
  loss_rules::add(table);
  embedding_rules::add(table);
  indexing_rules::add(table);
  joining_rules::add(table);
  attention_rules::add(table);
  convolution_rules::add(table);
  pooling_rules::add(table);
  linear_algebra_rules::add(table);
  random_rules::add(table);
  normalization_rules::add(table);
  return table;
}

const RuleTable& rule_table() {
  static const RuleTable table = make_table();
  return table;
}

}  // namespace

void RuleTable::add_operators(std::initializer_list<std::string_view> operators, const Rule& rule) {
  for (const auto name : operators) {
    insert(operators_, name, rule);
  }
}

void RuleTable::add_overloads(std::initializer_list<std::string_view> overloads, const Rule& rule) {
  for (const auto name : overloads) {
    insert(overloads_, name, rule);
  }
}

const Rule* RuleTable::find(std::string_view op) const {
  if (const auto found = overloads_.find(op); found != overloads_.end()) {
    return &found->second;
  }
  const auto name = without_overload(op);
  const auto functional = functional_name(name);
  const auto of_element =
      functional.starts_with(kForeach) ? "aten::" + std::string(functional.substr(kForeach.size())) : "";
  for (const std::string_view known : {name, functional, std::string_view(of_element)}) {
    if (const auto found = operators_.find(known); found != operators_.end()) {
      return &found->second;
    }
  }
  return nullptr;
}

std::vector<std::string> RuleTable::names() const {
  std::set<std::string> names;
  for (const auto& [name, rule] : overloads_) {
    names.insert(name);
  }
  for (const auto& [name, rule] : operators_) {
    names.insert(name);
  }
  return {names.begin(), names.end()};
}

const Rule* find_rule(std::string_view op) { return rule_table().find(op); }

bool is_per_element(std::string_view op) {
  constexpr std::array<std::string_view, 5> kPrefixes{kForeach, "aten::_amp_foreach_", "aten::_fused_adam",
                                                      "aten::_fused_sgd", "aten::_fused_adagrad"};
  return std::ranges::any_of(kPrefixes, [op](auto prefix) { return op.starts_with(prefix); });
}

Row with_split_factor(Row row, int64_t split_factor) {
  return changed(std::move(row), [split_factor](Placement& placement) {
    placement.split_factor = is_any_shard(placement) ? split_factor : placement.split_factor;
  });
}

Row with_mask(Row row, const Placement& masked) {
  return changed(std::move(row), [&masked](Placement& placement) {
    placement = is_any_mask(placement) ? masked : placement;
  });
}

std::vector<std::string> ops_with_rules() { return rule_table().names(); }

}  // namespace funcol
