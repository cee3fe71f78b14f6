// The decisions of a call: as values, as Python's DTensorSpecs, and the key under which they are remembered.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "layout/word_key.h"
#include "pyobjects/op_schemas.h"
#include "sharding/python_rows.h"

namespace funcol::python {

// The reason why PyTorch's propagator has to decide, such as "rule".
using Reason = std::string;

constexpr const char* kRefused = "refused";

// Returns all that the decisions of a call depend on. `has_rule`: a rule in C++ decides. Such rules read only
// the kind and sign of factors, and a program may change factors in every step, so the key leaves out their
// values.
WordKey decision_key(const PythonSchema& schema, bool has_rule);

// Returns (specs of outputs, specs of inputs, costs, whether inputs are redistributed). `masks` are those of
// rows from Python; makes the masks that the decision itself introduces.
py::tuple decided_specs(const PythonSchema& schema, const SubSchema& sub_schema,
                        const OutputSharding& sharding, MaskObjects masks);

struct SubDecision {
  OutputSharding sharding;
  MaskObjects masks = {};  // of rows from Python
};

// A decision of a call as values. Masks in the layouts are those of the call's tensors.
struct CallDecision {
  std::vector<std::optional<Spec>> outputs;  // those of each element of the lists, one after another
  std::vector<Layout> inputs;                // of PythonSchema::tensors
  bool moves = false;                        // some tensors are redistributed first
};

// The decisions of a call's sub-schemas. Equal ones, as most elements of an optimizer's lists are, share one.
class CallDecisions {
 public:
  // Raises what sub_schemas_of() raises. `schema` must outlive this.
  explicit CallDecisions(const PythonSchema& schema)
      : schema_(schema), sub_schemas_(sub_schemas_of(schema)) {}

  // A function that decides a sub-schema; `index` is that of an element of the lists, or None for the full
  // call.
  using Decide =
      std::function<std::variant<SubDecision, Reason>(SubSchema& sub_schema, const py::object& index)>;
  // Decides all sub-schemas. Returns the first reason not to.
  std::optional<Reason> decide(const Decide& decide_sub_schema);

  // Returns decided_specs() of each sub-schema.
  py::list specs() const;
  // Returns nullopt if a decision makes masks.
  std::optional<CallDecision> values() const;

 private:
  const PythonSchema& schema_;
  std::vector<SubSchema> sub_schemas_;
  std::vector<size_t> first_equal_;  // by sub-schema: the first one that equals it
  std::vector<SubDecision> decisions_;
};

}  // namespace funcol::python
