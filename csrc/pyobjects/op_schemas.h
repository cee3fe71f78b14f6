// PyTorch's OpSchema as a value: an operator and where the tensors among its arguments are.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

#include "propagation/propagator.h"

namespace funcol::python {

// Whether it is a DTensorSpec.
bool is_spec(py::handle object);

// An operator as its schema describes it. Made once an operator, never given back.
struct Operator {
  c10::OperatorHandle handle;
  std::string name;                             // OpCall::op
  std::vector<Argument> defaults;               // of every argument, none where there is no default
  std::vector<bool> is_written;                 // of every argument: in place, not by out=
  std::vector<std::optional<size_t>> returned;  // for each return the argument that it is, if it is one
  bool is_per_element = false;
};

// The operator of an OpOverload.
const Operator& to_operator(py::handle op_overload);

// The layout of a DTensorSpec of a tensor like `meta`; `whose` it is, for errors.
Layout read_layout(py::handle spec, const TensorMeta& meta, const std::string& whose);

// A DTensorSpec with tensor_meta. Errors as those of read_op_schema().
Spec read_spec(py::handle spec);

// Whether strided shards of a spec stand for a shard order. Only newer minors tell the two apart; in older
// ones a strided shard stands for itself.
bool stands_for_order(py::handle spec);

// A tensor of a schema, as Python has it.
struct TensorSpec {
  py::object spec;  // DTensorSpec
  py::object mesh;
};

struct PythonSchema {
  const Operator* op = nullptr;
  OpCall call;                                 // without outputs
  std::vector<TensorSpec> tensors;             // of call.tensors
  std::vector<Layout> layouts;                 // of call.tensors
  std::vector<bool> stays;                     // of call.tensors
  std::vector<std::optional<Layout>> results;  // those that in-place and out= results must have
  py::object mesh;                             // of the first tensor
  bool strided_as_order = false;               // a strided shard among the tensors stands for a shard order
};

// Reads an OpSchema whose tensors are DTensorSpecs. NotImplementedError for what has no counterpart among the
// values: symbolic sizes and numbers, placements of unknown kinds, arguments of other types. ValueError for
// specs without tensor_meta or without tensors at all. Keyword tensors stay where they are unless
// `moves_keywords`.
PythonSchema read_op_schema(py::handle op_schema, bool moves_keywords);

// The whole of a schema, or one element of its lists.
struct Part {
  OpSchema schema;
  py::object mesh;
  std::vector<size_t> tensors;  // the numbers that schema.call.tensors have in the whole
};

// One part, or one for each element where the operator does the same to every element of its lists.
// ValueError for tensors of different meshes in one part, unless they replicate.
std::vector<Part> parts_of(const PythonSchema& schema);

}  // namespace funcol::python
