// The decisions of ShardingEngine that are PyTorch's own.
#include <algorithm>
#include <utility>
#include <vector>

#include "propagation/rule.h"
#include "propagation/upstream_plans.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "sharding/foreach_dedup.h"
#include "sharding/output_sharding.h"
#include "sharding/sharding_engine.h"
#include "sharding/upstream_rules.h"
#include "sharding/upstream_strategies.h"

namespace funcol::python {
namespace {

// Returns true if C++ has prices for PyTorch's plans: the mesh has at most kMostAxes axes, or all tensors
// have the default shard order and no strided shards.
bool has_prices(const PythonSchema& schema) {
  return to_mesh(schema.mesh).num_axes() <= static_cast<int64_t>(UpstreamPlans::kMostAxes) ||
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

}  // namespace

// PyTorch's own decision of a call, for each element of its lists.
class ShardingEngine::AsPyTorch {
 public:
  AsPyTorch(const ShardingEngine& engine, py::handle op, const PythonSchema& schema, UpstreamRules& rules)
      : engine_(engine), op_(op), schema_(schema), rules_(rules), has_rule_(rules.is_in_cpp(op)) {}

  // Decides all elements. Returns the reason if PyTorch has to decide.
  std::optional<Reason> decide(const AskForRule& ask) {
    if (!has_prices(schema_)) {
      return "axes";
    }
    try {
      parts_ = parts_of(schema_);
    } catch (const c10::ValueError&) {  // tensors of several meshes
      return kRefused;
    }
    AlikeParts decided(parts_);
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (const auto same = decided.added_like(i)) {
        elements_.push_back({*same, {}, {}});
        continue;
      }
      const py::object index = schema_.op->is_per_element ? py::cast(i) : py::object(py::none());
      if (auto reason = decide(parts_[i], [&] { return ask(index); })) {
        return reason;
      }
      elements_.back().like = i;
      decided.add(i);
    }
    return std::nullopt;
  }

  py::list specs() const {
    py::list specs;
    for (size_t i = 0; i < elements_.size(); ++i) {
      const auto& [like, sharding, masks] = elements_[i];
      specs.append(like == i ? decided_specs(schema_, parts_[i], sharding, masks)
                             : with_own_outputs(specs[like].cast<py::tuple>()));
    }
    return specs;
  }

  // Returns nullopt if the decision makes masks.
  std::optional<CallDecision> values() const {
    CallDecision decision{{}, schema_.layouts, false};
    for (size_t i = 0; i < elements_.size(); ++i) {
      const auto& [like, sharding, masks] = elements_[elements_[i].like];
      if (!masks.empty() || !sharding.masks.empty()) {
        return std::nullopt;
      }
      for (size_t k = 0; k < parts_[i].tensors.size(); ++k) {
        decision.inputs[parts_[i].tensors[k]] = sharding.inputs[k];
      }
      decision.outputs.insert(decision.outputs.end(), sharding.outputs.begin(), sharding.outputs.end());
      decision.moves = decision.moves || sharding.needs_redistribute;
    }
    return decision;
  }

 private:
  struct Element {
    size_t like;  // the first element that asks the same
    OutputSharding sharding;
    MaskObjects masks;
  };

  std::optional<Reason> decide(Part& part, const std::function<py::object()>& ask) {
    const auto rule = rules_.rule_of(op_, schema_, part, ask);
    if (const auto* const reason = std::get_if<Reason>(&rule.rule)) {
      return *reason;
    }
    if (!fill_outputs(part.schema.call)) {
      return "metas";
    }
    auto choice = pytorchs_choice(schema_, part, rule);
    if (auto* const reason = std::get_if<Reason>(&choice)) {
      return std::move(*reason);
    }
    auto& sharding = std::get<OutputSharding>(choice);
    const auto* const axis_rule = std::get_if<std::shared_ptr<const AxisRule>>(&rule.rule);
    auto masks = axis_rule == nullptr ? MaskObjects() : (*axis_rule)->masks;
    const auto* const own = has_rule_ ? find_rule(part.schema.call.op) : nullptr;
    if (own != nullptr && std::ranges::all_of(part.schema.layouts, knows_layout) &&
        std::ranges::all_of(sharding.inputs, knows_layout)) {
      try {
        if (!allows(*own, part, sharding)) {
          sharding = engine_.propagator_.propagate(part.schema, (*own)(part.schema.call));
          masks = {};
        }
      } catch (const std::invalid_argument&) {
        return "write";
      }
    }
    elements_.push_back({0, std::move(sharding), std::move(masks)});
    return std::nullopt;
  }

  // Returns true if the decision is legal by the rule in C++. Adds the tensors that are written to.
  bool allows(const Rule& own, Part& part, OutputSharding& sharding) const {
    add_written_outputs(part.schema);
    for (const size_t number : part.schema.written) {
      sharding.outputs.emplace_back(Spec{part.schema.call.tensors[number], sharding.inputs[number]});
    }
    return engine_.propagator_.allows(part.schema, own(part.schema.call), sharding);
  }

  const ShardingEngine& engine_;
  py::handle op_;
  const PythonSchema& schema_;
  UpstreamRules& rules_;
  bool has_rule_;
  std::vector<Part> parts_;
  std::vector<Element> elements_;
};

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
  return remembered(op_schema, schema, rules.is_in_cpp(op), remember, [&]() -> py::object {
    AsPyTorch call(*this, op, schema, rules);
    const auto reason = call.decide([&](const py::object& index) { return rule_of(op_schema, index); });
    return reason ? otherwise(op_schema, *reason) : assemble(op_schema, call.specs());
  });
}

std::optional<CallDecision> ShardingEngine::decide_call(py::handle op, const PythonSchema& schema,
                                                        UpstreamRules& rules, const AskForRule& ask) const {
  AsPyTorch call(*this, op, schema, rules);
  return call.decide(ask) ? std::nullopt : call.values();
}

}  // namespace funcol::python
