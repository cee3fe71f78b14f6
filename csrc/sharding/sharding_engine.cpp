#include "sharding/sharding_engine.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>
#include <vector>

#include "metas/output_metas.h"
#include "sharding/foreach_dedup.h"
#include "sharding/output_sharding.h"
#include "sharding/python_strategies.h"

namespace funcol::python {
namespace {

std::vector<std::optional<TensorMeta>> output_metas_of(const OpCall& call) { return output_metas(call); }

// Returns the rows of one mesh axis. Returns nullopt if no one-axis rule exists that C++ supports, or if the
// outputs are not known: the operator depends on data, or does not run on Meta tensors. Adds masks of
// Python's rows to `masks`.
std::optional<Rows> rows_for(py::handle op_schema, OpSchema& schema, bool has_rule, py::handle rows_of,
                             MaskObjects& masks) {
  if (!fill_outputs(schema.call)) {
    return std::nullopt;
  }
  if (has_rule) {
    add_written_outputs(schema);
    return (*find_rule(schema.call.op))(schema.call);
  }
  try {
    return python_rows(op_schema, schema, rows_of, masks);
  } catch (const c10::NotImplementedError&) {  // placements with rules of their own
    return std::nullopt;
  }
}

}  // namespace

ShardingEngine::ShardingEngine(std::optional<CostModel> model, size_t capacity, bool moves_keywords)
    : propagator_(output_metas_of, std::move(model)),
      decisions_(find_table("decisions"), capacity),
      capacity_(capacity),
      moves_keywords_(moves_keywords) {}

py::object ShardingEngine::propagate(py::handle op_schema, py::handle rows_of, py::handle whole,
                                     py::handle assemble, bool remember) {
  PythonSchema schema;
  try {
    schema = read_op_schema(op_schema, moves_keywords_);
  } catch (const c10::NotImplementedError&) {
    return whole(op_schema, remember);
  }
  const bool has_rule = serves(*schema.op);
  return remembered(op_schema, schema, has_rule, remember,
                    [&] { return decide(op_schema, schema, has_rule, rows_of, whole, assemble); });
}

py::object ShardingEngine::decide(py::handle op_schema, const PythonSchema& schema, bool has_rule,
                                  py::handle rows_of, py::handle whole, py::handle assemble) {
  py::list elements;
  auto parts = parts_of(schema);
  AlikeParts decided(parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    auto& part = parts[i];
    if (const auto same = decided.added_like(i)) {
      elements.append(with_own_outputs(elements[*same].cast<py::tuple>()));
      continue;
    }
    MaskObjects masks;
    const auto rows = rows_for(op_schema, part.schema, has_rule, rows_of, masks);
    if (!rows.has_value()) {
      return whole(op_schema, false);
    }
    elements.append(decided_specs(schema, part, propagator_.propagate(part.schema, *rows), masks));
    decided.add(i);
  }
  return assemble(op_schema, elements);
}

py::object ShardingEngine::strategies(py::handle op_schema, py::handle rows_of) {
  const auto schema = read_op_schema(op_schema, moves_keywords_);
  py::list elements;
  for (auto& part : parts_of(schema)) {
    MaskObjects masks;
    const auto rows = rows_for(op_schema, part.schema, serves(*schema.op), rows_of, masks);
    if (!rows.has_value()) {
      return py::none();
    }
    py::list list;
    for (const auto& sharding : propagator_.strategies(part.schema, *rows)) {
      list.append(decided_specs(schema, part, sharding, masks));
    }
    elements.append(std::move(list));
  }
  return elements;  // NOLINT: no move, pybind11 converts
}

double ShardingEngine::time_decision(py::handle op_schema, size_t count) {
  const auto schema = read_op_schema(op_schema, moves_keywords_);
  double best = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < count; ++i) {
    propagator_.forget_costs();
    const auto begin = std::chrono::steady_clock::now();
    for (auto& part : parts_of(schema)) {
      propagator_.propagate(part.schema);
    }
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

void ShardingEngine::leave(const std::string& op) {
  left_.insert(op);
  decisions_.clear();
}

void ShardingEngine::clear() {
  decisions_.clear();
  propagator_.forget_costs();
  num_hits_ = num_misses_ = 0;
}

py::tuple ShardingEngine::info() const {
  return py::make_tuple(num_hits_, num_misses_, capacity_, decisions_.size());
}

bool ShardingEngine::serves(const Operator& op) const {
  return left_.count(op.name) == 0 && find_rule(op.name) != nullptr;
}

}  // namespace funcol::python
