// Copies, casts, and new tensors with the metadata of others.
#include "propagation/rules/dim_map.h"
#include "propagation/rules/pointwise.h"
#include "propagation/rules/rule_table.h"

namespace funcol::copy_rules {
namespace {

// Returns true if the integer dtype `to` holds all numbers of `from`.
bool fits(Dtype from, Dtype to) {
  return is_integral(from) && itemsize(to) > itemsize(from) && (is_unsigned(from) || !is_unsigned(to));
}

// Returns true if a reduction followed by a cast gives the same result as the cast followed by the reduction.
bool cast_commutes(PartialOp op, Dtype from, Dtype to) {
  if (from == to) {
    return true;
  }
  if (to == Dtype::kBool) {
    return false;
  }
  switch (op) {
    case PartialOp::kSum:
      return from != Dtype::kBool && (is_integral(from) || !is_integral(to));
    case PartialOp::kAvg:
      return !is_integral(from) && !is_integral(to);
    case PartialOp::kMin:
    case PartialOp::kMax:
      // Numbers that do not fit an integer dtype wrap around.
      return !is_complex(from) && !is_complex(to) && (!is_integral(to) || fits(from, to));
    default:
      return false;
  }
}

void add_partials_cast(RowList& rows, Dtype from, Dtype to) {
  for (const auto op : kAllPartialOps) {
    if (cast_commutes(op, from, to)) {
      rows.add_same_placement(partial(op));
    }
  }
}

void cast(const OpCall& call, RowList& rows) {
  add_partials_cast(rows, call.tensors.at(0).dtype, first_output(call).dtype);
}

// Adds the partials of copy(self, src). Elements of self do not matter, but its dtype is the result's.
void overwritten(const OpCall& call, RowList& rows) {
  add_partials_cast(rows, call.tensors.at(1).dtype, call.tensors[0].dtype);
}

void all_partials(const OpCall&, RowList& rows) { rows.add_partials(kAllPartialOps); }

// Adds rows for elements that do not come from self: every rank has the full result, even of a partial self.
void constant_like(const OpCall&, RowList& rows) {
  for (const auto op : kAllPartialOps) {
    rows.add(replicate(), {{"self", partial(op)}});
  }
}

// Returns the rule of new_empty(self, size) and similar operators. Unwritten results may have any placement.
Rule made_of_size(bool is_written) {
  return [is_written](const OpCall& call) {
    RowList rows(call);
    const auto& self = call.tensor("self");
    const bool same_shape = first_output(call).shape == self.shape;
    for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
      rows.add(same_shape ? any_shard(dim) : replicate(), {{"self", any_shard(dim)}});
    }
    for (const auto op : kAllPartialOps) {
      rows.add(same_shape && !is_written ? partial(op) : replicate(), {{"self", partial(op)}});
    }
    return rows.allowing_empty_shards();
  };
}

// Returns true if every rank's bytes are complete elements of both dtypes.
bool has_complete_elements(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  const int64_t last = num_dims(call) - 1;
  return is_cut_evenly(composition.inputs[0], mesh, last, call.tensors[0].shape[last]) &&
         is_cut_evenly(composition.inputs[0], mesh, last, first_output(call).shape[last]);
}

// Returns the rows of view.dtype, which reads bytes of a row as another dtype. Only the last dim is resized.
Rows reinterpreted(const OpCall& call) {
  RowList rows(call);
  const auto& self = call.tensors.at(0);
  add_mapped_dims(rows, same_dims(num_dims(call)));
  if (first_output(call).dtype == self.dtype) {
    rows.add_partials(kAllPartialOps);
  }
  return rows.allowing_empty_shards(first_output(call).shape == self.shape ? nullptr : has_complete_elements);
}

// Returns rows in which each rank writes found_inf for its own elements; the caller reduces found_inf.
Rows unscaled(const OpCall& call) {
  RowList rows(call);
  for (int64_t dim = 0; dim < call.tensor("self").num_dims(); ++dim) {
    std::vector<Placement> outputs(call.outputs.size(), replicate());
    if (!outputs.empty()) {
      outputs[0] = any_shard(dim);
    }
    rows.add(outputs, {{"self", any_shard(dim)}});
  }
  return rows.allowing_empty_shards();
}

// Returns no rows for eye(n, m): a shard does not know where the diagonal is.
Rows identity(const OpCall&) { return {}; }

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::_to_copy", "aten::positive", "prims::convert_element_type"}, pointwise(cast));
  table.add_overloads({"aten::to.dtype", "aten::to.dtype_layout", "aten::to.device"}, pointwise(cast));
  table.add_operators({"aten::copy", "prims::copy_to"}, pointwise(overwritten));
  table.add_operators({"aten::clone", "aten::contiguous", "aten::detach", "aten::alias", "aten::empty_like",
                       "aten::zero", "prims::view_of"},
                      pointwise(all_partials));
  table.add_overloads({"aten::view.dtype"}, reinterpreted);
  table.add_operators({"aten::full_like", "aten::ones_like", "aten::zeros_like", "aten::rand_like",
                       "aten::randn_like", "aten::randint_like"},
                      pointwise(constant_like));
  table.add_operators({"aten::eye"}, identity);
  table.add_operators({"aten::new_empty", "aten::new_empty_strided"}, made_of_size(false));
  table.add_operators({"aten::new_full", "aten::new_ones", "aten::new_zeros"}, made_of_size(true));
  table.add_operators({"aten::_fused_adam", "aten::_fused_adamw", "aten::_fused_sgd", "aten::_fused_adagrad"},
                      pointwise());
  table.add_operators({"aten::_amp_foreach_non_finite_check_and_unscale"}, unscaled);
}

}  // namespace funcol::copy_rules
