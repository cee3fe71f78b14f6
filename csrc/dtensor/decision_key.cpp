#include "dtensor/decision_key.h"

#include <c10/core/DefaultDtype.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>

#include "layout/hash.h"
#include "pyobjects/layouts.h"
#include "pyobjects/mesh_table.h"

namespace funcol::python {
namespace {

// Finds, of equal meshes, the first that was met. Decisions are the same for all of them, and keep only that
// one alive, as PyTorch's do.
class EqualMeshes {
 public:
  py::object first(py::handle mesh) {
    const auto* const known = firsts_.find(mesh);
    if (known != nullptr) {
      return py::reinterpret_borrow<py::object>(*known);
    }
    auto* const found = PyDict_SetDefault(kept_.ptr(), mesh.ptr(), mesh.ptr());
    if (found == nullptr) {
      throw py::error_already_set();
    }
    return py::reinterpret_borrow<py::object>(firsts_.put(mesh, found));
  }

  void forget() {
    firsts_.clear();
    const auto gone = std::exchange(kept_, py::dict());
  }

 private:
  py::dict kept_;
  MeshTable<PyObject*> firsts_;
};

EqualMeshes& equal_meshes() {
  static auto* const meshes = new EqualMeshes;  // NOLINT: outlives Python
  return *meshes;
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
  hash.add(reinterpret_cast<uintptr_t>(mesh.ptr()));
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

DecisionKey decision_key(py::handle op_schema, const PythonSchema& schema, bool has_rule) {
  DecisionKey key{op_schema.attr("op"),
                  schema.call,
                  schema.layouts,
                  schema.results,
                  equal_meshes().first(schema.mesh),
                  {},
                  to_mesh(schema.mesh).merged,
                  schema.strided_as_order,
                  c10::get_default_dtype_as_scalartype()};
  const bool is_one_mesh =
      std::ranges::all_of(schema.tensors, [&](const auto& tensor) { return tensor.mesh.is(schema.mesh); });
  if (!is_one_mesh) {
    for (const auto& tensor : schema.tensors) {
      key.meshes.push_back(equal_meshes().first(tensor.mesh));
    }
  }
  if (has_rule) {
    leave_out_factors(key.call);
  }
  return key;
}

void forget_meshes_of_keys() { equal_meshes().forget(); }

}  // namespace funcol::python
