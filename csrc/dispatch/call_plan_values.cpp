// Plans of calls that C++ has decided: the decision is in values, and so is the plan.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include "dispatch/call_plan.h"
#include "dispatch/mixed_tensors.h"
#include "layout/shards.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/layouts.h"
#include "pyobjects/meshes.h"
#include "pyobjects/specs.h"
#include "sharding/local_sizes.h"
#include "transfer/dtensors/redistribute_local_tensor.h"

namespace funcol::python {
namespace {

bool has_shards(const Layout& layout) {
  return std::ranges::any_of(layout.placements, [](const auto& one) { return one.is_shard(); });
}

bool has_norms(const Layout& layout) {
  return std::ranges::any_of(layout.placements, [](const auto& one) { return one.is_norm(); });
}

bool is_replicated(const Layout& layout) {
  return std::ranges::all_of(layout.placements, [](const auto& one) { return one.is_replicate(); });
}

py::object mesh_of(const Call& call) { return attribute<"mesh">(spec_of(call.first_dtensor())); }

std::vector<int64_t> dense_strides(const std::vector<int64_t>& shape, const std::vector<int64_t>& order) {
  std::vector<size_t> dims(shape.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    dims[i] = dims.size() - 1 - i;
  }
  std::ranges::stable_sort(dims, {}, [&](size_t dim) { return order[dim]; });
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (const size_t dim : dims) {
    strides[dim] = step;
    step *= std::max<int64_t>(shape[dim], 1);
  }
  return strides;
}

// Replaces the sizes of full tensors among a call's arguments by those of this rank's parts.
class LocalSizes {
 public:
  LocalSizes(const DecidedCall& decided, const LocalSizePlaces& places, const KnownMesh& known)
      : decided_(decided), places_(places), known_(known) {}

  // Returns the arguments to replace, by their place. Returns nullopt if another operator has to run.
  std::optional<std::vector<std::pair<size_t, c10::IValue>>> replaced() const {
    const auto& [schema, decision] = decided_;
    if (places_.shape) {
      return of_output();
    }
    if (std::ranges::none_of(decision.inputs, has_shards)) {
      return Replaced{};
    }
    const auto local = local_shape_of({schema.call.tensors[0], decision.inputs[0]});
    if (places_.squeezed_dims) {
      return squeezes_as_a_whole(local) ? std::optional(Replaced{}) : std::nullopt;
    }
    int64_t num_pixels = 1;
    for (size_t dim = 2; dim < local.size(); ++dim) {
      num_pixels *= local[dim];
    }
    const auto& numbers = places_.batch_channels_pixels;
    return Replaced{{numbers[0], local.at(0)}, {numbers[1], local.at(1)}, {numbers[2], num_pixels}};
  }

 private:
  using Replaced = std::vector<std::pair<size_t, c10::IValue>>;

  std::optional<Replaced> of_output() const {
    const auto& outputs = decided_.decision.outputs;
    if (outputs.size() != 1 || !outputs[0]) {
      return std::nullopt;
    }
    if (!has_shards(outputs[0]->layout)) {
      return Replaced{};
    }
    const auto shape = local_shape_of(*outputs[0]);
    Replaced replaced{{*places_.shape, shape}};
    if (places_.stride) {
      replaced.emplace_back(*places_.stride, dense_strides(shape, outputs[0]->meta.stride));
    }
    return replaced;
  }

  std::vector<int64_t> local_shape_of(const Spec& spec) const {
    return local_shape(spec.layout, known_.mesh, spec.meta.shape, *known_.coordinate);
  }

  // Returns true if this rank's part has size 1 only where the full tensor has.
  bool squeezes_as_a_whole(const std::vector<int64_t>& local) const {
    const auto& call = decided_.schema.call;
    const auto& shape = call.tensors[0].shape;
    std::vector<int64_t> dims(shape.size());
    if (call.has_arg("dim")) {
      dims = call.arg("dim").integers();
    } else {
      std::iota(dims.begin(), dims.end(), 0);
    }
    return std::ranges::all_of(dims, [&](int64_t dim) {
      const auto index = counted_from_0(call, dim, static_cast<int64_t>(shape.size()));
      return shape.empty() || local.at(index) != 1 || shape.at(index) == 1;
    });
  }

  const DecidedCall& decided_;
  const LocalSizePlaces& places_;
  const KnownMesh& known_;
};

}  // namespace

std::optional<ServedCall> ServedCall::make(const c10::OperatorHandle& op, const DescribedOperator& described,
                                           const torch::jit::Stack& stack, const Call& call,
                                           const DecidedCall& decided) {
  ServedCall served;
  if (!can_serve(described, call) || !served.take_arguments(op, described, stack, call, decided) ||
      !served.take_results(op, described, call, decided)) {
    return std::nullopt;
  }
  return served;
}

bool ServedCall::take_arguments(const c10::OperatorHandle& op, const DescribedOperator& described,
                                const torch::jit::Stack& stack, const Call& call,
                                const DecidedCall& decided) {
  const auto& arguments = op.schema().arguments();
  const auto& [schema, decision] = decided;
  if (const auto places = local_size_places(described.overload)) {
    auto replaced = LocalSizes(decided, *places, known_mesh(mesh_of(call))).replaced();
    if (!replaced) {
      return false;
    }
    replaced_ = *std::move(replaced);
  }
  const bool has_keyword_tensors =
      std::ranges::any_of(schema.keywords, [](const auto& keyword) { return !keyword.out; });
  if (has_keyword_tensors && (decision.moves || !replaced_.empty())) {
    return false;
  }
  const auto* const values = stack.data() + (stack.size() - arguments.size());
  std::erase_if(replaced_, [&](const auto& one) { return values[one.first] == one.second; });
  size_t next = 0;  // of the schema's tensors
  for (size_t number = 0; decision.moves && number < call.tensors.size(); ++number) {
    if (arguments[call.tensors[number].place].is_out() || call.tensors[number].is_number) {
      continue;
    }
    if (!take_tensor(described, call, number, decided, next++)) {
      return false;
    }
  }
  return true;
}

bool ServedCall::take_tensor(const DescribedOperator& described, const Call& call, size_t number,
                             const DecidedCall& decided, size_t index) {
  const auto& held = call.tensors[number];
  const auto& meta = decided.schema.call.tensors[index];
  const auto& source = decided.schema.layouts[index];
  const auto& target = decided.decision.inputs[index];
  if (held.dtensor == nullptr ? is_replicated(target) : source == target) {
    return true;
  }
  if (described.is_aliased[held.place]) {
    return false;
  }
  const auto& spec = decided.schema.tensors[index].spec;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(static_cast<at::ScalarType>(meta.dtype)));
  if (has_norms(source) || has_norms(target) || has_strided_shards(source) || has_strided_shards(target) ||
      has_masks(source) || has_masks(target)) {
    if (has_masks(target)) {
      return false;
    }
    return take_move(number, spec,
                     to_python_spec({meta, target}, mesh_of(call), decided.schema.strided_as_order, {}),
                     itemsize);
  }
  auto execution = execution_between(source, target, meta.shape, itemsize, mesh_of(call));
  if (execution == nullptr) {
    return false;
  }
  moves_.push_back({number, std::move(execution)});
  return true;
}

bool ServedCall::take_results(const c10::OperatorHandle& op, const DescribedOperator& described,
                              const Call& call, const DecidedCall& decided) {
  using Results = DescribedOperator::Results;
  const auto& outputs = decided.decision.outputs;
  const auto& returns = op.schema().returns();
  const bool has_placements =
      !returns.empty() && std::ranges::any_of(outputs, [](const auto& output) { return output.has_value(); });
  if (described.results == Results::kNone || described.results == Results::kNumbers) {
    return !has_placements;
  }
  if (!has_placements) {
    return false;
  }
  if (described.results == Results::kFirstArgument) {
    const auto& first = call.tensors[0];
    return first.place == 0 && first.index < 0 && first.dtensor != nullptr && outputs.size() == 1 &&
           outputs[0]->layout.placements == decided.schema.layouts[0].placements;
  }
  if (described.results == Results::kOut) {
    return take_outputs(op, call, decided);
  }
  const auto is_list = [](const auto& value) { return value.real_type()->kind() == c10::TypeKind::ListType; };
  const bool returns_list = returns.size() == 1 && is_list(returns[0]);
  if (!returns_list && (outputs.size() != returns.size() || std::ranges::any_of(returns, is_list))) {
    return false;
  }
  const auto mesh = mesh_of(call);
  for (const auto& output : outputs) {
    if (output) {
      auto shared = shared_output(decided, *output, mesh);
      if (shared == nullptr) {
        return false;
      }
      specs_.push_back(std::move(shared));
    } else if (returns_list) {
      return false;
    }
    if (!returns_list) {
      ends_.push_back(static_cast<uint32_t>(specs_.size()));
    }
  }
  if (returns_list) {
    ends_.push_back(static_cast<uint32_t>(specs_.size()));
  }
  return true;
}

bool ServedCall::take_outputs(const c10::OperatorHandle& op, const Call& call, const DecidedCall& decided) {
  const auto& outputs = decided.decision.outputs;
  for (size_t number = 0; number < call.tensors.size(); ++number) {
    const auto& one = call.tensors[number];
    if (!op.schema().arguments()[one.place].is_out()) {
      continue;
    }
    if (one.dtensor == nullptr || one.index >= 0 || outputs_.size() == outputs.size() ||
        !outputs[outputs_.size()]) {
      return false;
    }
    auto* const held = spec_of(one.dtensor);
    auto shared = shared_output(decided, *outputs[outputs_.size()], attribute<"mesh">(held));
    if (shared == nullptr) {
      return false;
    }
    outputs_.emplace_back(number, shared->id == id_of_spec(held) ? nullptr : std::move(shared));
  }
  return outputs_.size() == outputs.size() && outputs_.size() == op.schema().returns().size();
}

SharedSpecPtr ServedCall::shared_output(const DecidedCall& decided, const Spec& output, py::handle mesh) {
  const auto& schema = decided.schema;
  for (size_t i = 0; i < schema.tensors.size(); ++i) {
    if (schema.tensors[i].mesh.is(mesh) && schema.layouts[i] == output.layout &&
        schema.call.tensors[i] == output.meta) {
      return shared_spec(schema.tensors[i].spec.ptr());
    }
  }
  return shared_spec_of(output, mesh, schema.strided_as_order);
}

}  // namespace funcol::python
