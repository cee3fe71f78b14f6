// PyTorch's sharding rules of calls, read from Python, and its choice by such a rule.
//
// A rule of one mesh axis is queried from Python once and remembered as rows. The key leaves out what rules
// do not depend on: placements, meshes and, for the rules that come with PyTorch, the sizes of tensors apart
// from which are 0, 1 or equal, and how they compare with the integers of the call.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "layout/cache.h"
#include "layout/word_key.h"
#include "propagation/propagator.h"
#include "pyobjects/attributes.h"
#include "pyobjects/op_schemas.h"
#include "sharding/call_decisions.h"

namespace funcol::python {

// The rule of a call for one mesh axis.
struct AxisRule {
  std::vector<Row> rows;
  size_t num_inputs = 0;
  bool allows_uneven = false;
  std::vector<size_t> other_mesh_inputs;  // positions of tensors that may be on another mesh
  std::vector<size_t> even_dims;          // dims of the first tensor that have to be cut evenly
  MaskObjects masks;                      // of the rows
  py::object accepts;  // PyTorch's filter: accepts(specs of tensors, specs of outputs); null if none
};

// The rule of a call for all mesh axes at once: placements of all tensors and of the output.
struct MeshRule {
  std::vector<std::vector<Placement>> inputs;
  std::vector<Placement> output;
};

struct UpstreamRule {
  std::variant<std::shared_ptr<const AxisRule>, MeshRule, Reason> rule;
  // The split factors of the shards for which placeholders in rows stand, in PyTorch's order; 1 is plain.
  std::vector<int64_t> split_factors = {};
};

// Fills in the outputs of a call, unless they are known. Returns false if they cannot be found: the operator
// depends on data, or raises an error.
bool fill_outputs(OpCall& call);

class UpstreamRules {
 public:
  // Reads rules from `base`, PyTorch's propagator. `own` has, for each of its tables of rules by attribute,
  // the rules that come with PyTorch, by operator. `replaced` has operators that these rules do not decide.
  UpstreamRules(py::object base, py::dict own, py::dict replaced)
      : base_(std::move(base)), own_(std::move(own)), replaced_(std::move(replaced)) {}

  // Returns true if a rule of the propagator decides, and C++ knows which arguments are local sizes.
  bool decides(py::handle op_overload) const;
  // Returns true if C++ has a rule, and the program has not replaced PyTorch's.
  bool is_in_cpp(py::handle op_overload) const;

  // Returns the rule for `sub_schema`. query_rule() returns an AxisRule or a WholeRule of
  // funcol.installation.pytorch_rules, or the reason why C++ cannot compose the rule.
  UpstreamRule rule_of(py::handle op_overload, const PythonSchema& schema, SubSchema& sub_schema,
                       const std::function<py::object()>& query_rule);

  void clear() { known_.clear(); }

 private:
  struct Remembered {
    std::shared_ptr<const AxisRule> rule;
    py::object info;  // its address is in the key

    size_t heap_bytes() const;
  };

  // Returns the entry of an operator in a table of the propagator; null if there is none.
  template <AttributeName name>
  PyObject* entry(py::handle op_overload) const;
  template <AttributeName name>
  PyObject* own_entry(py::handle op_overload) const;

  py::object base_;
  py::dict own_;
  py::dict replaced_;
  Cache<WordKey, Remembered> known_{find_table("rules")};
};

// Returns the composition that PyTorch chooses for `sub_schema`, whose outputs are known; the reason if
// PyTorch has to decide. `rule` must not be a reason. Keyword tensors keep their layouts. Throws what
// PyTorch's filter raises.
std::variant<OutputSharding, Reason> pytorchs_choice(const PythonSchema& schema, const SubSchema& sub_schema,
                                                     const UpstreamRule& rule);

}  // namespace funcol::python
