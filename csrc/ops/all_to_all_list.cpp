// all_to_all of a list of tensors, one for each rank, that may differ in their number of rows: one exchange
// of the rows of all.
#include <ATen/ops/cat.h>

#include <utility>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/meta.h"
#include "ops/parts.h"

namespace funcol {
namespace all_to_all_list {
namespace {

using c10::IValue;
using c10::SymInt;
using c10::SymIntArrayRef;
using Tensors = std::vector<at::Tensor>;

constexpr auto kOp = "all_to_all";

void check_inputs(at::TensorList inputs, const c10d::ProcessGroup& group) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(inputs.size()) == group.getSize(), "funcol::", kOp, ": ",
                    inputs.size(), " tensors for the ", group.getSize(), " ranks of group '",
                    group_name(group), "'. Pass one tensor per rank.");
  check_one_device_and_dtype(inputs, kOp);
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    check_has_dims(inputs[rank], kOp);
    TORCH_CHECK_VALUE(inputs[rank].sym_sizes().slice(1).equals(inputs[0].sym_sizes().slice(1)),
                      "funcol::", kOp, ": tensor ", rank, " has shape ", inputs[rank].sym_sizes(),
                      ", tensor 0 ", inputs[0].sym_sizes(), ". Only dim 0 may differ.");
  }
}

struct Rows {
  SymSizes sent;      // to each rank
  SymSizes received;  // from each rank
};

SymSizes num_rows(at::TensorList inputs) {
  SymSizes rows;
  for (const auto& input : inputs) {
    rows.push_back(input.sym_size(0));
  }
  return rows;
}

// Checks the arguments.
Rows rows_of(at::TensorList inputs, SymIntArrayRef output_splits, const c10d::ProcessGroup& group) {
  check_inputs(inputs, group);
  auto sent = num_rows(inputs);
  if (!output_splits.empty()) {
    check_split_sizes(output_splits, "output_split_sizes", group, kOp);
    return {std::move(sent), output_splits.vec()};
  }
  for (const auto& size : sent) {
    TORCH_CHECK_VALUE(size.sym_eq(sent[0]).expect_true(__FILE__, __LINE__), "funcol::", kOp,
                      ": the tensors have ", SymIntArrayRef(sent),
                      " rows. Pass output_split_sizes, the number of rows that come from each rank.");
  }
  return {sent, sent};
}

Tensors meta(at::TensorList inputs, SymIntArrayRef output_splits, const IValue& group) {
  const auto rows = rows_of(inputs, output_splits, *group_from_ivalue(group, kOp));
  auto sizes = inputs[0].sym_sizes().vec();
  Tensors results;
  for (const auto& size : rows.received) {
    sizes[0] = size;
    results.push_back(meta_of_sizes(inputs[0], sizes));
  }
  return results;
}

Tensors traced(at::TensorList inputs, SymIntArrayRef output_splits, const IValue& group) {
  const auto rows = rows_of(inputs, output_splits, *group_from_ivalue(group, kOp));
  const auto source = at::cat(inputs).contiguous();
  return call::all_to_all_single.traced(source, rows.received, rows.sent, group)
      .split_with_sizes_symint(rows.received);
}

autograd::Data saved(at::TensorList inputs, SymIntArrayRef, const IValue& group) {
  return {SymIntArrayRef(num_rows(inputs)), group};
}

Tensors rule(const Tensors& gradients, const autograd::Values&, const autograd::Data& data) {
  return call::all_to_all(gradients, data[0].toSymIntVector(), data[1]);
}

}  // namespace
}  // namespace all_to_all_list

StartedCollective start_all_to_all_list(at::TensorList inputs, at::IntArrayRef output_splits,
                                        const GroupPtr& group) {
  const BelowAutograd below_autograd;
  const auto rows = all_to_all_list::rows_of(inputs, c10::fromIntArrayRefSlow(output_splits), *group);
  const auto sent = C10_AS_INTARRAYREF_SLOW(rows.sent);
  const auto received = C10_AS_INTARRAYREF_SLOW(rows.received);
  check_own_splits(received, sent, *group, all_to_all_list::kOp);
  settle(inputs);
  auto source = at::cat(inputs).contiguous();
  agree_on_exchange_if_checked(*group, all_to_all_list::kOp, source, received, sent);
  auto sizes = source.sizes().vec();
  sizes[0] = C10_AS_INTARRAYREF_SLOW(SymSizes{sum(rows.received)})[0];
  const auto received_rows = fresh_tensor(sizes, source);
  auto work = exchange(source, received_rows, received.vec(), sent.vec(), *group);
  return {all_to_all_list::kOp,
          group,
          std::move(work),
          as_list(std::move(source)),
          received_rows.split_with_sizes(received),
          {}};
}

const decltype(call::all_to_all) call::all_to_all({.name = "all_to_all"}, start_all_to_all_list,
                                                  {.meta = all_to_all_list::meta,
                                                   .traced = all_to_all_list::traced,
                                                   .rule = all_to_all_list::rule,
                                                   .saved = all_to_all_list::saved,
                                                   .check = check_one_device_and_dtype});

}  // namespace funcol
