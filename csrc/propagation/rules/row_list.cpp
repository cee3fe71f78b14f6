#include "propagation/rules/row_list.h"

#include <algorithm>
#include <stdexcept>

#include "layout/shards.h"

namespace funcol {
namespace {

bool has_arithmetic_of(PartialOp op, Dtype dtype) {
  switch (op) {
    case PartialOp::kSum:
    case PartialOp::kProduct:
      return dtype != Dtype::kBool;
    case PartialOp::kAvg:
      return !is_integral(dtype);
    case PartialOp::kMin:
    case PartialOp::kMax:
      return !is_complex(dtype);
    default:
      return is_integral(dtype);
  }
}

}  // namespace

void RowList::add(const std::vector<Placement>& outputs, std::vector<Placement> inputs) {
  if (outputs.size() != call_.outputs.size() || inputs.size() != call_.tensors.size()) {
    throw std::logic_error(call_.op + ": a row for " + std::to_string(outputs.size()) + " outputs and " +
                           std::to_string(inputs.size()) + " inputs, the call has " +
                           std::to_string(call_.outputs.size()) + " and " +
                           std::to_string(call_.tensors.size()));
  }
  Row row;
  for (size_t i = 0; i < outputs.size(); ++i) {
    row.outputs.push_back(call_.outputs[i] ? std::optional(outputs[i]) : std::nullopt);
  }
  row.inputs = std::move(inputs);
  rows_.push_back(std::move(row));
}

void RowList::add(const std::vector<Placement>& outputs, NamedPlacements inputs) {
  add(outputs, inputs_by_name(inputs));
}

void RowList::add(const Placement& output, std::vector<Placement> inputs) {
  add(std::vector<Placement>(call_.outputs.size(), output), std::move(inputs));
}

void RowList::add(const Placement& output, NamedPlacements inputs) { add(output, inputs_by_name(inputs)); }

void RowList::add_arithmetic(const Placement& output, std::vector<Placement> inputs) {
  const auto fits = [](const Placement& placement, const TensorMeta& meta) {
    return !placement.is_partial() || has_arithmetic_of(placement.op, meta.dtype);
  };
  bool all_integral = true;  // of the partial inputs
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!fits(inputs[i], call_.tensors.at(i))) {
      return;
    }
    all_integral = all_integral && (!inputs[i].is_partial() || is_integral(call_.tensors[i].dtype));
  }
  for (const auto& meta : call_.outputs) {
    // Numbers that each rank rounds to integers do not add up.
    if (meta &&
        (!fits(output, *meta) || (is_integral(meta->dtype) && !all_integral &&
                                  (output.op == PartialOp::kSum || output.op == PartialOp::kProduct)))) {
      return;
    }
  }
  add(output, std::move(inputs));
}

void RowList::add_arithmetic(const Placement& output, NamedPlacements inputs) {
  add_arithmetic(output, inputs_by_name(inputs));
}

void RowList::add_same_placement(const Placement& placement) { add(placement, all_inputs(placement)); }

void RowList::add_same_placement(const Placement& placement, ArgumentNames arguments) {
  add(placement, inputs_of(arguments, placement));
}

void RowList::add_partials(PartialOps ops) {
  for (const auto op : ops) {
    add_same_placement(partial(op));
  }
}

void RowList::add_partials(PartialOps ops, ArgumentNames arguments) {
  for (const auto op : ops) {
    add_same_placement(partial(op), arguments);
  }
}

void RowList::add_arithmetic_partials(PartialOps ops) {
  for (const auto op : ops) {
    add_arithmetic(partial(op), all_inputs(partial(op)));
  }
}

void RowList::add_arithmetic_partials(PartialOps ops, ArgumentNames arguments) {
  for (const auto op : ops) {
    add_arithmetic(partial(op), inputs_of(arguments, partial(op)));
  }
}

Rows RowList::allowing_empty_shards(LegalityCheck is_legal) {
  return {.rows = std::move(rows_), .allows_empty_shards = true, .is_legal = std::move(is_legal)};
}

Rows RowList::refusing_empty_shards(LegalityCheck is_legal) {
  return {.rows = std::move(rows_), .allows_empty_shards = false, .is_legal = std::move(is_legal)};
}

std::vector<Placement> RowList::all_inputs(const Placement& placement) const {
  return std::vector<Placement>(call_.tensors.size(), placement);
}

// Returns `placement` for the tensors of these arguments, Replicate for the others.
std::vector<Placement> RowList::inputs_of(ArgumentNames arguments, const Placement& placement) {
  std::ranges::for_each(arguments, [this](auto name) { check_has(name); });
  std::vector<Placement> inputs;
  inputs.reserve(call_.tensors.size());
  for (const auto name : names()) {
    const bool is_named = std::ranges::find(arguments, name) != arguments.end();
    inputs.push_back(is_named ? placement : replicate());
  }
  return inputs;
}

std::vector<Placement> RowList::inputs_by_name(NamedPlacements named) {
  std::ranges::for_each(named, [this](const auto& one) { check_has(one.first); });
  return funcol::inputs_by_name(names(), named);
}

void RowList::check_has(std::string_view argument) const {
  if (!call_.has_arg(argument)) {
    throw std::logic_error(call_.op + ": its rule names an argument '" + std::string(argument) +
                           "', which the operator does not have");
  }
}

const std::vector<std::string_view>& RowList::names() {
  if (names_.empty()) {
    names_ = tensor_names(call_);
  }
  return names_;
}

std::vector<std::string_view> tensor_names(const OpCall& call) {
  std::vector<std::string_view> names(call.tensors.size());
  for (const auto& [name, argument] : call.args) {
    if (argument.is_tensor()) {
      names.at(argument.tensor()) = name;
    } else if (argument.is_list()) {
      for (const auto& item : argument.list()) {
        if (item.is_tensor()) {
          names.at(item.tensor()) = name;
        }
      }
    }
  }
  return names;
}

std::vector<Placement> inputs_by_name(const std::vector<std::string_view>& names, NamedPlacements named) {
  std::vector<Placement> inputs;
  inputs.reserve(names.size());
  for (const auto name : names) {
    const auto* found = std::ranges::find(named, name, &std::pair<std::string_view, Placement>::first);
    inputs.push_back(found == named.end() ? replicate() : found->second);
  }
  return inputs;
}

const TensorMeta& first_output(const OpCall& call) {
  if (const auto& output = call.outputs.at(0)) {
    return *output;
  }
  throw std::invalid_argument(call.op + ": the call returns no tensor, but its rule needs one.");
}

const Layout& first_output(const OpCall& call, const Composition& composition) {
  if (const auto& output = composition.outputs.at(0)) {
    return *output;
  }
  throw std::invalid_argument(call.op + ": the composition has no layout for the first output.");
}

bool has_tensor(const OpCall& call, std::string_view name) {
  return call.has_arg(name) && call.arg(name).is_tensor();
}

bool flag_or(const OpCall& call, std::string_view name, bool otherwise) {
  return call.has_arg(name) && !call.arg(name).is_none() ? call.arg(name).boolean() : otherwise;
}

std::optional<double> real_number(const OpCall& call, std::string_view name) {
  if (!call.has_arg(name)) {
    return std::nullopt;
  }
  const auto& value = call.arg(name).value;
  if (const auto* truth = std::get_if<bool>(&value)) {
    return *truth ? 1.0 : 0.0;
  }
  if (std::holds_alternative<int64_t>(value) || std::holds_alternative<double>(value)) {
    return call.arg(name).number();
  }
  return std::nullopt;
}

int64_t dim_argument(const OpCall& call, std::string_view name) {
  return dim_argument(call, name, num_dims(call));
}

int64_t dim_argument(const OpCall& call, std::string_view name, int64_t num_dims) {
  return counted_from_0(call, call.arg(name).integer(), num_dims);
}

}  // namespace funcol
