#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "async/buffer_release.h"
#include "comm/agreement.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/meta.h"

namespace funcol {
namespace permute {
namespace {

using c10::IValue;
using c10::SymInt;

constexpr auto kOp = "permute_tensor";

// This rank's splits, in full tensors, in a permutation that sends the tensor of rank m to rank
// destinations[m]: 1 for each rank that it sends to or receives from, 0 for the others.
struct PermuteSplits {
  PermuteSplits(at::IntArrayRef destinations, const c10d::ProcessGroup& group);

  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  int64_t num_sent;
  int64_t num_received;
};

PermuteSplits::PermuteSplits(at::IntArrayRef destinations, const c10d::ProcessGroup& group)
    : sent(group.getSize(), 0), received(group.getSize(), 0) {
  check_permute(destinations, group);
  const auto rank = group.getRank();
  for (size_t sender = 0; sender < destinations.size(); ++sender) {
    if (static_cast<int64_t>(sender) == rank) {
      sent[destinations[sender]] = 1;
    }
    if (destinations[sender] == rank) {
      received[sender] = 1;
    }
  }
  num_sent = c10::sum_integers(sent);
  num_received = c10::sum_integers(received);
}

// Returns the sizes of the received tensors, concatenated along dim 0 unless there is one.
SymSizes received_sizes(const at::Tensor& input, int64_t num_received) {
  if (num_received == 1) {
    return input.sym_sizes().vec();
  }
  auto sizes = sizes_with_dims(input);
  sizes[0] = sizes[0] * SymInt(num_received);
  return sizes;
}

at::Tensor meta(const at::Tensor& input, at::IntArrayRef destinations, const IValue& group) {
  const PermuteSplits splits(destinations, *group_from_ivalue(group, kOp));
  return splits.num_received == 1 ? meta_like(input)
                                  : meta_of_sizes(input, received_sizes(input, splits.num_received));
}

at::Tensor traced(const at::Tensor& input, at::IntArrayRef destinations, const IValue& group) {
  const PermuteSplits splits(destinations, *group_from_ivalue(group, kOp));
  const auto numels = [&](const std::vector<int64_t>& num_tensors) {
    SymSizes numels;
    for (const auto count : num_tensors) {
      numels.push_back(count == 0 ? SymInt(0) : input.sym_numel());
    }
    return numels;
  };
  const auto flat = splits.num_sent == 0 ? input.flatten().narrow(0, 0, 0) : input.flatten();
  return call::all_to_all_single
      .traced(flat.contiguous(), numels(splits.received), numels(splits.sent), group)
      .view_symint(received_sizes(input, splits.num_received));
}

// Sends the gradients, as rows of an exchange, back to the ranks from which the tensors came.
std::vector<at::Tensor> rule(const std::vector<at::Tensor>& gradients, const autograd::Values&,
                             const autograd::Data& data) {
  const auto& group = data[1];
  const auto sizes = data[2].toSymIntVector();
  const PermuteSplits splits(data[0].toIntVector(), *group_from_ivalue(group, kOp));
  SymSizes row_sizes{SymInt(splits.num_received)};
  row_sizes.insert(row_sizes.end(), sizes.begin(), sizes.end());
  const auto gradient = GradientCollectives::unshared(gradients[0]);
  const auto rows =
      call::all_to_all_single(gradient.reshape_symint(row_sizes), c10::fromIntArrayRefSlow(splits.sent),
                              c10::fromIntArrayRefSlow(splits.received), group);
  return {splits.num_sent == 1 ? rows.squeeze(0) : autograd::zeros_after(rows, sizes)};
}

}  // namespace
}  // namespace permute

StartedCollective start_permute(const at::Tensor& input, at::IntArrayRef destinations,
                                const GroupPtr& group) {
  const BelowAutograd below_autograd;
  check_dense(input, permute::kOp);
  const permute::PermuteSplits splits(destinations, *group);
  agree_if_checked(*group, permute::kOp, input, "src_dst=", destinations);
  // Rows are full tensors.
  const auto source = contiguous_input(input);
  const auto rows_in = source.unsqueeze(0).slice(0, 0, splits.num_sent);
  auto row_sizes = source.sizes().vec();
  row_sizes.insert(row_sizes.begin(), splits.num_received);
  const auto rows_out = fresh_tensor(row_sizes, source);
  auto work = exchange(rows_in, rows_out, splits.received, splits.sent, *group);
  auto out = rows_out.size(0) == 1 ? rows_out.squeeze(0)
             : source.dim() == 0   ? rows_out
                                   : rows_out.flatten(0, 1);
  return {permute::kOp, group, std::move(work), {source, rows_out}, as_list(std::move(out)), {}};
}

const decltype(call::permute_tensor) call::permute_tensor(
    {.name = "permute_tensor"}, start_permute,
    {.meta = permute::meta,
     .traced = permute::traced,
     .rule = permute::rule,
     .saved = decltype(call::permute_tensor)::arguments_and_sizes});

}  // namespace funcol
