// The parts of a schema: the full schema, or one part for each element of its lists.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pyobjects/layouts.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {
namespace {

// A builder of a part of a schema: of all of it, or of one element of its lists.
class PartOf {
 public:
  // Takes all of a schema; with an `index`, only that element of each list.
  PartOf(const PythonSchema& whole, std::optional<size_t> index) : whole_(whole), index_(index) {}

  Part take() {
    auto& schema = part_.schema;
    schema.call.op = whole_.call.op;
    if (!index_.has_value()) {
      schema.results = whole_.results;
    }
    for (size_t i = 0; i < whole_.call.args.size(); ++i) {
      const auto& [name, argument] = whole_.call.args[i];
      const size_t first = schema.call.tensors.size();
      schema.call.args.emplace_back(name, take(argument));
      if (whole_.op->returned.empty() && whole_.op->is_written[i]) {
        add_written(first);
      }
    }
    settle_mesh();
    return std::move(part_);
  }

 private:
  // Notes that the operator writes to the tensors from number `first` on, except for those that may move.
  void add_written(size_t first) {
    auto& schema = part_.schema;
    for (size_t number = first; number < schema.call.tensors.size(); ++number) {
      if (schema.stays[number]) {
        schema.written.push_back(number);
        schema.results.emplace_back(schema.layouts[number]);
      }
    }
  }

  Argument take(const Argument& argument) {
    if (argument.is_list()) {
      const auto& list = argument.list();
      if (index_.has_value()) {
        return list.empty() ? argument : take(list.at(*index_));
      }
      Argument::List taken;
      for (const auto& element : list) {
        taken.push_back(take(element));
      }
      return {std::move(taken)};
    }
    if (!argument.is_tensor()) {
      return argument;
    }
    auto& schema = part_.schema;
    const auto number = argument.tensor();
    const TensorNumber taken{schema.call.tensors.size()};
    schema.call.tensors.push_back(whole_.call.tensors[number]);
    schema.layouts.push_back(whole_.layouts[number]);
    schema.stays.push_back(whole_.stays[number]);
    part_.tensors.push_back(number);
    return {taken};
  }

  // Uses the mesh of the first tensor. A replicated tensor of another mesh is a value that every rank has.
  void settle_mesh() {
    if (part_.tensors.empty()) {  // of a factory with out=
      part_.mesh = whole_.mesh;
      part_.schema.mesh = to_mesh(whole_.mesh);
      return;
    }
    const auto& first = whole_.tensors[part_.tensors[0]];
    part_.mesh = first.mesh;
    part_.schema.mesh = to_mesh(first.mesh);
    for (size_t i = 1; i < part_.tensors.size(); ++i) {
      const auto& other = whole_.tensors[part_.tensors[i]];
      if (other.mesh.is(first.mesh) || other.mesh.equal(first.mesh)) {
        continue;
      }
      auto& layout = part_.schema.layouts[i];
      const bool is_everywhere =
          index_.has_value() && std::ranges::all_of(layout.placements, [](const auto& placement) {
            return placement.is_replicate();
          });
      TORCH_CHECK_VALUE(is_everywhere, "funcol::", kPropagateOpSharding, ": ", whole_.call.op,
                        " got tensors of two meshes, ", std::string(py::str(first.spec)), " on ",
                        std::string(py::str(first.mesh)), " and ", std::string(py::str(other.spec)), " on ",
                        std::string(py::str(other.mesh)), ", the second as tensor argument ", i,
                        ". Expected one mesh: redistribute does not move data between meshes.");
      layout = {std::vector<Placement>(part_.schema.mesh.num_axes()), {}};
    }
  }

  const PythonSchema& whole_;
  std::optional<size_t> index_;
  Part part_;
};

size_t num_list_elements(const PythonSchema& schema) {
  for (const auto& [name, argument] : schema.call.args) {
    if (argument.is_list()) {
      return argument.list().size();
    }
  }
  return 0;
}

}  // namespace

std::vector<Part> parts_of(const PythonSchema& schema) {
  std::vector<Part> parts;
  if (!schema.op->is_per_element) {
    parts.push_back(PartOf(schema, std::nullopt).take());
    return parts;
  }
  const auto count = num_list_elements(schema);
  for (size_t i = 0; i < count; ++i) {
    parts.push_back(PartOf(schema, i).take());
  }
  return parts;
}

}  // namespace funcol::python
