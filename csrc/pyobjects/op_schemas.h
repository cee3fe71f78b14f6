// Values of PyTorch's OpSchema, an operator and its arguments, and of DTensorSpec.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

#include "propagation/propagator.h"

namespace funcol::python {

// The function that decides placements, as error messages name it.
constexpr auto kPropagateOpSharding = "propagate_op_sharding";

// Returns true if the object is a DTensorSpec.
bool is_spec(py::handle object);

// An operator, described by its schema. Made once for each operator, and never freed.
struct Operator {
  c10::OperatorHandle handle;
  std::string name;                             // OpCall::op
  std::vector<Argument> defaults;               // of every argument, none where there is no default
  std::vector<bool> is_written;                 // of every argument: in place, not by out=
  std::vector<std::optional<size_t>> returned;  // for each return the argument that is returned, if any
  bool is_per_element = false;
  Py_hash_t hash = 0;  // of the OpOverload
};

// Returns the operator of an OpOverload.
const Operator& to_operator(py::handle op_overload);

// Returns the entry of an operator in a dict by OpOverload, borrowed; null if there is none. Does not call
// the overload's __hash__, which is in Python.
PyObject* find_entry(py::handle table, py::handle op_overload);

// Returns true if PyTorch's rules take each tensor in a list of the operator's arguments as an operand.
// `schema_info`: a RuntimeSchemaInfo, or None.
bool lists_operands(py::handle schema_info);

// Returns the layout of a DTensorSpec of a tensor like `meta`. `whose` names the tensor in errors.
Layout read_layout(py::handle spec, const TensorMeta& meta, const std::string& whose);

// Returns the value of a DTensorSpec with tensor_meta. Raises what read_op_schema() raises.
Spec read_spec(py::handle spec);
// Returns the same, with norm partials and with partials that do not commute, as PyTorch's rules take them.
// Does not check the shard order.
Spec read_spec_as_pytorch(py::handle spec);

// A tensor of a schema as Python objects.
struct TensorSpec {
  py::object spec;  // DTensorSpec
  py::object mesh;
};

// A tensor given by keyword, as PyTorch's rules see it.
struct KeywordTensor {
  std::string name;
  std::optional<Spec> out;        // of a tensor to write to, which is not in OpCall::args
  bool strided_as_order = false;  // strided shards of `out` stand for a shard order
};

struct PythonSchema {
  const Operator* op = nullptr;
  OpCall call;                                 // without outputs
  std::vector<TensorSpec> tensors;             // of call.tensors
  std::vector<Layout> layouts;                 // of call.tensors
  std::vector<bool> is_pinned;                 // of call.tensors: whether it cannot move
  std::vector<std::optional<Layout>> results;  // layouts that in-place and out= results must have
  py::object mesh;                             // of the first tensor
  bool strided_as_order = false;               // a strided shard among the tensors stands for a shard order
  // For PyTorch's rules: how many arguments are given by position, the tensors given by keyword, and whether
  // tensors in lists are operands of their own.
  size_t num_positional = 0;
  std::vector<KeywordTensor> keywords = {};
  bool lists_operands = false;
};

enum class Reading {
  kStrict,     // as read_spec() does
  kAsPyTorch,  // as read_spec_as_pytorch() does
};

// Reads an OpSchema whose tensors are DTensorSpecs. Raises NotImplementedError for symbolic sizes and
// numbers, placements of unknown kinds, and arguments of other types; ValueError for specs without
// tensor_meta, and for a schema without tensors. Keyword tensors stay where they are unless `moves_keywords`.
PythonSchema read_op_schema(py::handle op_schema, bool moves_keywords, Reading reading = Reading::kStrict);

// Reads the arguments of a call as PyTorch's rules see them. `specs` are those of its tensors, in their
// order; numbers that PyTorch has wrapped in tensors have none. Keyword tensors may move. `lists_operands`:
// see PythonSchema. Raises what read_op_schema() raises.
PythonSchema read_call_schema(py::handle op_overload, at::ArrayRef<c10::IValue> arguments,
                              const std::vector<py::object>& specs, bool lists_operands);

// A full schema, or one element of its lists.
struct SubSchema {
  OpSchema schema;
  py::object mesh;
  std::vector<size_t> tensors;  // the numbers of schema.call.tensors in the full schema
};

// Returns the full schema, or one for each element if the operator does the same to every element of its
// lists. Raises ValueError for tensors of different meshes in one of them, unless they replicate.
std::vector<SubSchema> sub_schemas_of(const PythonSchema& schema);

}  // namespace funcol::python
