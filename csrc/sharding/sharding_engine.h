// Sharding decisions for operators on DTensors: made by the rules in C++ or in Python, and remembered.
//
// Everything here needs the GIL, which is the lock of the caches, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_set>
#include <variant>

#include "layout/cache.h"
#include "planner/cost_model.h"
#include "propagation/propagator.h"
#include "pyobjects/op_schemas.h"
#include "sharding/call_decisions.h"
#include "sharding/upstream_rules.h"

namespace funcol::python {

// The bytes of an OutputSharding in Python, with the specs of a call of three tensors, as an estimate.
constexpr size_t kOutputShardingBytes = 500 + 4 * 700;

// A function that returns PyTorch's rule, for UpstreamRules::rule_of(), of an element of the lists or of the
// full call (None).
using QueryRule = std::function<py::object(const py::object& index)>;

class ShardingEngine {
 public:
  struct Decision {
    py::object sharding;

    size_t heap_bytes() const { return kOutputShardingBytes; }
  };

  // Remembers `capacity` decisions at most. `model`: none for the mesh's default model. `moves_keywords`:
  // whether the caller redistributes keyword tensors, too.
  ShardingEngine(std::optional<CostModel> model, size_t capacity, bool moves_keywords);

  // Returns the decision for a call. `rows_of(op_schema)` returns rows, or None, for an operator without a
  // rule in C++. `assemble(op_schema, elements)` makes the remembered object of the decisions.
  // `fallback(op_schema, remember)` decides if there are no rows, or if C++ does not support the schema or an
  // output.
  py::object propagate(py::handle op_schema, py::handle rows_of, py::handle fallback, py::handle assemble,
                       bool remember);

  // Returns PyTorch's own decision by `rules`, which query rule_of(op_schema, index) for the rule of an
  // element of the lists, or of the full call (None). `otherwise(op_schema, reason)` decides if C++ does not
  // support the schema or an output, and if PyTorch would raise an error. If C++ has a rule, PyTorch's
  // decision is followed only if that rule allows it; else C++ decides by it.
  py::object propagate_as_pytorch(py::handle op_schema, UpstreamRules& rules, py::handle rule_of,
                                  py::handle otherwise, py::handle assemble, bool remember);

  // Returns the same decision as values, and does not remember it. Returns nullopt if `otherwise` would
  // decide, and for a decision that makes masks.
  std::optional<CallDecision> decide_call(py::handle op, const PythonSchema& schema, UpstreamRules& rules,
                                          const QueryRule& query_rule) const;

  // Returns all legal decisions, a list for each element of the operator's lists; None if there are no rows.
  py::object strategies(py::handle op_schema, py::handle rows_of);

  // Returns the least time, in seconds, of `count` decisions in C++ alone, each from empty caches.
  double time_decision(py::handle op_schema, size_t count);

  // Disables the C++ rule of this operator.
  void disable_rule(const std::string& op);

  void clear();
  // Returns (hits, misses, capacity, number of decisions).
  py::tuple info() const;

 private:
  bool has_cpp_rule(const Operator& op) const;

  // Returns the decision of decide(), made once for all equal calls, or each time without `remember`.
  py::object remembered(const PythonSchema& schema, bool has_rule, bool remember,
                        const std::function<py::object()>& decide);
  // Decides a call by `rules`. Returns the reason if PyTorch has to decide.
  std::variant<CallDecisions, Reason> decide_as_pytorch(py::handle op, const PythonSchema& schema,
                                                        UpstreamRules& rules,
                                                        const QueryRule& query_rule) const;
  // Decides by a rule in C++ if PyTorch raises an error. Returns kRefused if there is no decision.
  std::variant<SubDecision, Reason> decide_by(const Rule& rule, SubSchema& sub_schema) const;
  std::variant<SubDecision, Reason> follow(const UpstreamRule& rule, const PythonSchema& schema,
                                           SubSchema& sub_schema, bool has_rule) const;

  Propagator propagator_;
  Cache<WordKey, Decision> decisions_;
  size_t capacity_;
  bool moves_keywords_;
  size_t num_hits_ = 0;
  size_t num_misses_ = 0;
  std::unordered_set<std::string> disabled_rules_;
};

// Counts a sharding decision by its reason: "C++" if C++ made it, otherwise why it fell back to PyTorch.
void count_decision(py::handle op_overload, const std::string& reason);

// Returns {operator: {reason: count}} since the last forget_decision_counts().
std::map<std::string, std::map<std::string, size_t>> decision_counts();
void forget_decision_counts();

}  // namespace funcol::python
