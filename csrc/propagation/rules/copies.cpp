// Copies and casts, and tensors made after the likeness of others.
#include "propagation/rules/families.h"
#include "propagation/rules/pointwise.h"

namespace funcol {
namespace {

// Whether the integer dtype `to` has all numbers of `from`.
bool fits(Dtype from, Dtype to) {
  return is_integral(from) && itemsize(to) > itemsize(from) && (is_unsigned(from) || !is_unsigned(to));
}

// Whether a reduction of `from` cast to `to` is the reduction of what is cast.
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
      // What does not fit an integer dtype is wrapped around.
      return !is_complex(from) && !is_complex(to) && (!is_integral(to) || fits(from, to));
    default:
      return false;
  }
}

// The tensor itself, of another dtype perhaps.
void cast(const OpCall& call, RowList& rows) {
  for (const auto op : kAllPartialOps) {
    if (cast_commutes(op, call.tensors.at(0).dtype, first_output(call).dtype)) {
      rows.add_alike(partial(op));
    }
  }
}

// copy_(self, src): what self held does not matter, but it is where the result goes.
void overwritten(const OpCall& call, RowList& rows) {
  for (const auto op : kAllPartialOps) {
    if (cast_commutes(op, call.tensors.at(1).dtype, call.tensors[0].dtype)) {
      rows.add_alike(partial(op));
    }
  }
}

void partials_kept(const OpCall&, RowList& rows) {
  for (const auto op : kAllPartialOps) {
    rows.add_alike(partial(op));
  }
}

// What is made does not come from self's elements: whole on every rank, wherever these are pending.
void constant_like(const OpCall& call, RowList& rows) {
  for (const auto op : kAllPartialOps) {
    rows.add(replicate(), inputs_by_name(call, {{"self", partial(op)}}));
  }
}

// new_empty(self, size) and its like. Elements that nobody has written yet may be called pending.
Rule made_of_size(bool is_written) {
  return [is_written](const OpCall& call) {
    RowList rows(call);
    const auto& self = call.tensor("self");
    const bool same_shape = first_output(call).shape == self.shape;
    for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
      rows.add(same_shape ? any_shard(dim) : replicate(), inputs_by_name(call, {{"self", any_shard(dim)}}));
    }
    for (const auto op : kAllPartialOps) {
      rows.add(same_shape && !is_written ? partial(op) : replicate(),
               inputs_by_name(call, {{"self", partial(op)}}));
    }
    return Rows{.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
  };
}

// view.dtype: the bytes of a row read as another dtype. Only the last dim changes its length.
Rows reinterpreted(const OpCall& call) {
  RowList rows(call);
  const auto& self = call.tensors.at(0);
  for (int64_t dim = 0; dim < self.num_dims(); ++dim) {
    rows.add_alike(any_shard(dim));
  }
  if (first_output(call).dtype == self.dtype) {
    partials_kept(call, rows);
  }
  Rows result{.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
  if (first_output(call).shape != self.shape) {
    result.is_legal = [](const OpCall& viewed, const Composition& composition, const Mesh& mesh) {
      const int64_t last = viewed.tensors[0].num_dims() - 1;
      return is_cut_evenly(composition.inputs[0], mesh, last, viewed.tensors[0].shape[last]) &&
             is_cut_evenly(composition.inputs[0], mesh, last, first_output(viewed).shape[last]);
    };
  }
  return result;
}

// found_inf is written, too: on every rank for what it has seen, so that it is to be reduced by the caller.
Rows unscaled(const OpCall& call) {
  RowList rows(call);
  for (int64_t dim = 0; dim < call.tensor("self").num_dims(); ++dim) {
    std::vector<Placement> outputs(call.outputs.size(), replicate());
    if (!outputs.empty()) {
      outputs[0] = any_shard(dim);
    }
    rows.add(outputs, inputs_by_name(call, {{"self", any_shard(dim)}}));
  }
  return Rows{.rows = rows.take(), .allows_empty_shards = true, .is_legal = nullptr};
}

// eye(n, m): no part knows where its diagonal is.
Rows identity(const OpCall&) { return {}; }

}  // namespace

void add_copy_rules(RuleTable& table) {
  table.add_all_overloads({"aten::_to_copy", "aten::positive", "prims::convert_element_type"},
                          pointwise(cast));
  table.add_overloads({"aten::to.dtype", "aten::to.dtype_layout", "aten::to.device"}, pointwise(cast));
  table.add_all_overloads({"aten::copy", "prims::copy_to"}, pointwise(overwritten));
  table.add_all_overloads({"aten::clone", "aten::contiguous", "aten::detach", "aten::alias",
                           "aten::empty_like", "aten::zero", "prims::view_of"},
                          pointwise(partials_kept));
  table.add_overloads({"aten::view.dtype"}, reinterpreted);
  table.add_all_overloads({"aten::full_like", "aten::ones_like", "aten::zeros_like", "aten::rand_like",
                           "aten::randn_like", "aten::randint_like"},
                          pointwise(constant_like));
  table.add_all_overloads({"aten::eye"}, identity);
  table.add_all_overloads({"aten::new_empty", "aten::new_empty_strided"}, made_of_size(false));
  table.add_all_overloads({"aten::new_full", "aten::new_ones", "aten::new_zeros"}, made_of_size(true));
}

void add_optimizer_rules(RuleTable& table) {
  table.add_all_overloads(
      {"aten::_fused_adam", "aten::_fused_adamw", "aten::_fused_sgd", "aten::_fused_adagrad"}, pointwise());
  table.add_all_overloads({"aten::_amp_foreach_non_finite_check_and_unscale"}, unscaled);
}

}  // namespace funcol
