// The sub-schemas of a schema: the full schema, or one for each element of its lists.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pyobjects/layouts.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {
namespace {

// A builder of a sub-schema: of the full schema, or of one element of its lists.
class SubSchemaBuilder {
 public:
  // Takes all of a schema; with an `index`, only that element of each list.
  SubSchemaBuilder(const PythonSchema& full, std::optional<size_t> index) : full_(full), index_(index) {}

  SubSchema build() {
    auto& schema = sub_schema_.schema;
    schema.call.op = full_.call.op;
    if (!index_.has_value()) {
      schema.results = full_.results;
    }
    for (size_t i = 0; i < full_.call.args.size(); ++i) {
      const auto& [name, argument] = full_.call.args[i];
      const size_t first = schema.call.tensors.size();
      schema.call.args.emplace_back(name, build(argument));
      if (full_.op->returned.empty() && full_.op->is_written[i]) {
        add_written(first);
      }
    }
    set_mesh();
    return std::move(sub_schema_);
  }

 private:
  // Notes that the operator writes to the tensors from number `first` on, except for those that may move.
  void add_written(size_t first) {
    auto& schema = sub_schema_.schema;
    for (size_t number = first; number < schema.call.tensors.size(); ++number) {
      if (schema.is_pinned[number]) {
        schema.written.push_back(number);
        schema.results.emplace_back(schema.layouts[number]);
      }
    }
  }

  Argument build(const Argument& argument) {
    if (argument.is_list()) {
      const auto& list = argument.list();
      if (index_.has_value()) {
        return list.empty() ? argument : build(list.at(*index_));
      }
      Argument::List taken;
      for (const auto& element : list) {
        taken.push_back(build(element));
      }
      return {std::move(taken)};
    }
    if (!argument.is_tensor()) {
      return argument;
    }
    auto& schema = sub_schema_.schema;
    const auto number = argument.tensor();
    const TensorNumber taken{schema.call.tensors.size()};
    schema.call.tensors.push_back(full_.call.tensors[number]);
    schema.layouts.push_back(full_.layouts[number]);
    schema.is_pinned.push_back(full_.is_pinned[number]);
    sub_schema_.tensors.push_back(number);
    return {taken};
  }

  // Uses the mesh of the first tensor. A replicated tensor of another mesh is a value that every rank has.
  void set_mesh() {
    if (sub_schema_.tensors.empty()) {  // of a factory with out=
      sub_schema_.mesh = full_.mesh;
      sub_schema_.schema.mesh = to_mesh(full_.mesh);
      return;
    }
    const auto& first = full_.tensors[sub_schema_.tensors[0]];
    sub_schema_.mesh = first.mesh;
    sub_schema_.schema.mesh = to_mesh(first.mesh);
    for (size_t i = 1; i < sub_schema_.tensors.size(); ++i) {
      const auto& other = full_.tensors[sub_schema_.tensors[i]];
      if (other.mesh.is(first.mesh) || other.mesh.equal(first.mesh)) {
        continue;
      }
      auto& layout = sub_schema_.schema.layouts[i];
      const bool is_everywhere =
          index_.has_value() && std::ranges::all_of(layout.placements, [](const auto& placement) {
            return placement.is_replicate();
          });
      TORCH_CHECK_VALUE(is_everywhere, "funcol::", kPropagateOpSharding, ": ", full_.call.op,
                        " got tensors of two meshes, ", std::string(py::str(first.spec)), " on ",
                        std::string(py::str(first.mesh)), " and ", std::string(py::str(other.spec)), " on ",
                        std::string(py::str(other.mesh)), ", the second as tensor argument ", i,
                        ". Expected one mesh: redistribute does not move data between meshes.");
      layout = {std::vector<Placement>(sub_schema_.schema.mesh.num_axes()), {}};
    }
  }

  const PythonSchema& full_;
  std::optional<size_t> index_;
  SubSchema sub_schema_;
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

std::vector<SubSchema> sub_schemas_of(const PythonSchema& schema) {
  std::vector<SubSchema> sub_schemas;
  if (!schema.op->is_per_element) {
    sub_schemas.push_back(SubSchemaBuilder(schema, std::nullopt).build());
    return sub_schemas;
  }
  const auto count = num_list_elements(schema);
  for (size_t i = 0; i < count; ++i) {
    sub_schemas.push_back(SubSchemaBuilder(schema, i).build());
  }
  return sub_schemas;
}

}  // namespace funcol::python
