#include "sharding/decision_key.h"

#include <c10/core/DefaultDtype.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>

#include "layout/hash.h"
#include "pyobjects/layouts.h"
#include "pyobjects/meshes.h"

namespace funcol::python {
namespace {

size_t bytes_of(const Argument& argument) {
  if (!argument.is_list()) {
    const auto* const text = std::get_if<std::string>(&argument.value);
    return text == nullptr ? 0 : funcol::heap_bytes(*text);
  }
  size_t bytes = kBlockBytes;
  for (const auto& element : argument.list()) {
    bytes += sizeof element + bytes_of(element);
  }
  return bytes;
}

void add_argument(Hash& hash, const Argument& argument) {
  hash.add(argument.value.index());
  if (argument.is_list()) {
    hash.add(argument.list().size());
    for (const auto& element : argument.list()) {
      add_argument(hash, element);
    }
  } else if (const auto* integer = std::get_if<int64_t>(&argument.value)) {
    hash.add(static_cast<uint64_t>(*integer));
  } else if (const auto* flag = std::get_if<bool>(&argument.value)) {
    hash.add(*flag ? 1 : 0);
  }
}

// Replaces a number by the one that stands for its kind and sign.
void leave_only_sign(Argument& argument) {
  if (auto* const number = std::get_if<double>(&argument.value)) {
    if (std::isfinite(*number)) {
      *number = *number > 0 ? 1 : *number < 0 ? -1 : 0;
    }
  } else if (auto* const integer = std::get_if<int64_t>(&argument.value)) {
    *integer = *integer > 0 ? 1 : *integer < 0 ? -1 : 0;
  } else if (auto* const list = std::get_if<Argument::List>(&argument.value)) {
    std::ranges::for_each(*list, leave_only_sign);
  }
}

// The kind of a factor decides the dtype of the result, its sign whether an order is kept, and sums of parts
// keep no factors that are not finite.
void leave_out_factors(OpCall& call) {
  constexpr std::array<std::string_view, 5> kFactors = {"other", "scalar", "scalars", "alpha", "beta"};
  for (auto& [name, argument] : call.args) {
    if (std::ranges::find(kFactors, name) != kFactors.end()) {
      leave_only_sign(argument);
    }
  }
}

}  // namespace

size_t DecisionKey::hash() const {
  Hash hash;
  hash.add(reinterpret_cast<uintptr_t>(op.ptr()));
  hash.add(mesh);
  for (const auto& [name, argument] : call.args) {
    add_argument(hash, argument);
  }
  for (const auto& meta : call.tensors) {
    hash.add_all(meta.shape);
    hash.add_all(meta.stride);
    hash.add(static_cast<uint64_t>(meta.dtype));
  }
  for (const auto& layout : layouts) {
    hash.add(layout);
  }
  return hash.value();
}

size_t DecisionKey::heap_bytes() const {
  size_t bytes = funcol::heap_bytes(call.op) + funcol::heap_bytes(call.tensors) +
                 funcol::heap_bytes(layouts) + funcol::heap_bytes(results) + funcol::heap_bytes(meshes) +
                 funcol::heap_bytes(merged);
  for (const auto& [name, argument] : call.args) {
    bytes += sizeof call.args[0] + funcol::heap_bytes(name) + bytes_of(argument);
  }
  return bytes;
}

DecisionKey decision_key(py::handle op_schema, const PythonSchema& schema, bool has_rule) {
  DecisionKey key{op_schema.attr("op"),
                  schema.call,
                  schema.layouts,
                  schema.results,
                  value_of_mesh(schema.mesh),
                  {},
                  to_mesh(schema.mesh).merged,
                  schema.strided_as_order,
                  c10::get_default_dtype_as_scalartype()};
  const bool is_one_mesh =
      std::ranges::all_of(schema.tensors, [&](const auto& tensor) { return tensor.mesh.is(schema.mesh); });
  if (!is_one_mesh) {
    for (const auto& tensor : schema.tensors) {
      key.meshes.push_back(value_of_mesh(tensor.mesh));
    }
  }
  if (has_rule) {
    leave_out_factors(key.call);
  }
  return key;
}

}  // namespace funcol::python
