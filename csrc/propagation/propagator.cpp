#include "propagation/propagator.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <sstream>
#include <string_view>
#include <utility>

#include "propagation/compositions.h"

namespace funcol {
namespace {

[[noreturn]] void refuse(const OpSchema& schema, const std::string& why) {
  throw std::invalid_argument("funcol: " + schema.call.op + ": " + why + " In " + to_string(schema) + ".");
}

void check_dim(const OpSchema& schema, const Placement& placement, const TensorMeta& meta,
               const std::string& what) {
  if (placement.is_shard() && (placement.dim < 0 || placement.dim >= meta.num_dims())) {
    refuse(schema, "its rule shards dim " + std::to_string(placement.dim) + " of " + what + ", " +
                       to_string(meta) + ".");
  }
}

void check_rows(const OpSchema& schema, const Rows& rows) {
  const auto& call = schema.call;
  for (const auto& row : rows.rows) {
    if (row.outputs.size() != call.outputs.size() || row.inputs.size() != call.tensors.size()) {
      refuse(schema, "its rule gave " + std::to_string(row.outputs.size()) + " placements of outputs and " +
                         std::to_string(row.inputs.size()) + " of tensor arguments. Expected " +
                         std::to_string(call.outputs.size()) + " and " + std::to_string(call.tensors.size()) +
                         ".");
    }
    for (size_t i = 0; i < row.inputs.size(); ++i) {
      check_dim(schema, row.inputs[i], call.tensors[i], "tensor argument " + std::to_string(i));
    }
    for (size_t i = 0; i < row.outputs.size(); ++i) {
      const auto& placement = row.outputs[i];
      const auto& meta = call.outputs[i];
      if (placement.has_value() && meta.has_value()) {
        check_dim(schema, *placement, *meta, "output " + std::to_string(i));
      }
    }
  }
}

std::vector<Operand> operands_of(const OpSchema& schema) {
  std::vector<Operand> operands;
  operands.reserve(schema.layouts.size());
  for (size_t i = 0; i < schema.layouts.size(); ++i) {
    operands.push_back({schema.layouts[i], i < schema.is_pinned.size() && schema.is_pinned[i]});
  }
  return operands;
}

// Returns the reason why no decision is legal, and the remedy.
std::string why_no_decision(const OpSchema& schema) {
  const bool keeps_some =
      std::ranges::find(schema.is_pinned, true) != schema.is_pinned.end() ||
      std::ranges::any_of(schema.results, [](const auto& one) { return one.has_value(); });
  if (keeps_some) {
    return "no way to run it leaves the tensors that it writes to, and those given by keyword, where they "
           "are. Redistribute them first, or use the operator that returns a new tensor.";
  }
  return "no redistribution of its tensors makes it right on every rank. Redistribute them first, to "
         "placements that it takes: Replicate always is one.";
}

std::vector<std::optional<Layout>> required_outputs(const OpSchema& schema) {
  auto required = schema.results;
  required.resize(schema.call.outputs.size());
  return required;
}

OutputSharding to_sharding(const OpSchema& schema, const Rows& rows, PricedComposition choice) {
  OutputSharding sharding;
  for (size_t i = 0; i < schema.call.outputs.size(); ++i) {
    const auto& meta = schema.call.outputs[i];
    auto& layout = choice.composition.outputs[i];
    sharding.outputs.push_back(meta.has_value() && layout.has_value()
                                   ? std::optional(Spec{*meta, std::move(*layout)})
                                   : std::nullopt);
  }
  sharding.inputs = std::move(choice.composition.inputs);
  sharding.costs = std::move(choice.costs);
  sharding.needs_redistribute = choice.moves;
  sharding.masks = rows.masks;
  return sharding;
}

// Returns the edit distance (Levenshtein) of `a` and `b`.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

std::string unknown_operator(const std::string& op) {
  std::string near;
  for (const auto& name : similar_ops(op)) {
    near += (near.empty() ? "" : ", ") + name;
  }
  return "funcol: the operator " + op + " has no sharding rule in C++. Operators with near names: " + near +
         ". Give propagate() the rows of one mesh axis.";
}

}  // namespace

void add_written_outputs(OpSchema& schema) {
  for (const size_t number : schema.written) {
    schema.call.outputs.emplace_back(schema.call.tensors[number]);
  }
}

std::string to_string(const Spec& spec) {
  return "Spec(" + to_string(spec.meta) + "(" + to_string(spec.layout) + "))";
}

std::string to_string(const OpSchema& schema) {
  std::ostringstream text;
  text << schema.call.op << '(';
  for (size_t i = 0; i < schema.layouts.size(); ++i) {
    text << (i == 0 ? "" : ", ") << to_string(Spec{schema.call.tensors[i], schema.layouts[i]});
  }
  text << ") on ";
  for (size_t axis = 0; axis < schema.mesh.sizes.size(); ++axis) {
    text << (axis == 0 ? "" : "x") << schema.mesh.sizes[axis];
  }
  return text.str();
}

Propagator::Propagator(OutputMetas output_metas, std::optional<CostModel> model)
    : output_metas_(std::move(output_metas)), model_(std::move(model)) {}

std::shared_ptr<SearchPool> Propagator::costs_on(const Mesh& mesh) const {
  const std::scoped_lock lock(mutex_);
  const auto found = std::ranges::find_if(costs_, [&](const auto& source) { return source->mesh() == mesh; });
  auto source = found != costs_.end() ? *found : std::make_shared<SearchPool>(mesh, model_);
  if (found != costs_.end()) {
    costs_.erase(found);
  }
  costs_.insert(costs_.begin(), std::move(source));
  costs_.resize(std::min(costs_.size(), kMostMeshes));
  return costs_.front();
}

void Propagator::forget_costs() const {
  const std::scoped_lock lock(mutex_);
  costs_.clear();
}

std::pair<OpSchema, Rows> Propagator::with_rule(const OpSchema& schema) const {
  const auto* rule = find_rule(schema.call.op);
  if (rule == nullptr) {
    throw NoRuleError(unknown_operator(schema.call.op));
  }
  auto known = schema;
  known.call.outputs = output_metas_(schema.call);
  add_written_outputs(known);
  auto rows = (*rule)(known.call);
  return {std::move(known), std::move(rows)};
}

OutputSharding Propagator::propagate(const OpSchema& schema) const {
  const auto [known, rows] = with_rule(schema);
  return propagate(known, rows);
}

OutputSharding Propagator::propagate(const OpSchema& schema, const Rows& rows) const {
  check_rows(schema, rows);
  const auto cheapest_by = [&](SearchPool& costs) {
    return cheapest_composition(schema.call, rows, operands_of(schema), required_outputs(schema), costs);
  };
  auto choice = cheapest_by(*costs_on(schema.mesh));
  if (!choice.has_value() &&
      model_.has_value()) {  // the model has no price for some layouts that plans can reach
    SearchPool costs(schema.mesh, std::nullopt);
    choice = cheapest_by(costs);
  }
  if (!choice.has_value()) {
    refuse(schema, why_no_decision(schema));
  }
  return to_sharding(schema, rows, std::move(*choice));
}

bool Propagator::allows(const OpSchema& schema, const Rows& rows, const OutputSharding& sharding) const {
  check_rows(schema, rows);
  Composition wanted{{}, sharding.inputs};
  for (const auto& output : sharding.outputs) {
    wanted.outputs.push_back(output ? std::optional(output->layout) : std::nullopt);
  }
  const auto operands = operands_of(schema);
  const auto required = required_outputs(schema);
  return Compositions(schema.call, rows, schema.mesh, operands, required).contains(wanted);
}

std::vector<OutputSharding> Propagator::strategies(const OpSchema& schema) const {
  const auto [known, rows] = with_rule(schema);
  return strategies(known, rows);
}

std::vector<OutputSharding> Propagator::strategies(const OpSchema& schema, const Rows& rows) const {
  check_rows(schema, rows);
  std::vector<OutputSharding> shardings;
  for (auto& choice : legal_compositions(schema.call, rows, operands_of(schema), required_outputs(schema),
                                         *costs_on(schema.mesh))) {
    shardings.push_back(to_sharding(schema, rows, std::move(choice)));
  }
  return shardings;
}

std::vector<std::string> similar_ops(const std::string& op) {
  constexpr size_t kMost = 5;
  std::vector<std::pair<size_t, std::string>> ranked;
  for (const auto& name : ops_with_rules()) {
    ranked.emplace_back(distance(without_overload(op), without_overload(name)), name);
  }
  std::ranges::sort(ranked);
  ranked.resize(std::min(kMost, ranked.size()));
  std::vector<std::string> names;
  names.reserve(ranked.size());
  for (auto& [how_far, name] : ranked) {
    names.push_back(std::move(name));
  }
  return names;
}

}  // namespace funcol
