#include "transfer/run_transfer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/collectives.h"
#include "ops/exchange.h"
#include "transfer/blocks.h"
#include "transfer/box_copies.h"
#include "transfer/op_names.h"

namespace funcol {
namespace {

std::vector<int64_t> shape_of(const std::optional<std::vector<Intervals>>& indices) {
  if (!indices.has_value()) {
    return {0};
  }
  std::vector<int64_t> shape;
  std::ranges::transform(*indices, std::back_inserter(shape), num_indices);
  return shape;
}

// The positions begin, begin + 1, ..., end - 1 of a list of positions.
Intervals sublist(const Intervals& positions, int64_t begin, int64_t end) {
  Intervals part;
  int64_t seen = 0;
  for (const auto& interval : positions) {
    const int64_t from = std::max(begin - seen, int64_t{0});
    const int64_t to = std::min(end - seen, interval.size);
    if (from < to) {
      append(part, {interval.begin + from, to - from});
    }
    seen += interval.size;
  }
  return part;
}

// The runs from one list of positions to another of the same length.
std::vector<Run> runs_between(const Intervals& from, const Intervals& to) {
  std::vector<Run> runs;
  size_t i = 0;
  size_t j = 0;
  int64_t seen_from = 0;  // of from[i]
  int64_t seen_to = 0;
  while (i < from.size() && j < to.size()) {
    const int64_t size = std::min(from[i].size - seen_from, to[j].size - seen_to);
    runs.push_back({from[i].begin + seen_from, to[j].begin + seen_to, size});
    seen_from += size;
    seen_to += size;
    if (seen_from == from[i].size) {
      ++i;
      seen_from = 0;
    }
    if (seen_to == to[j].size) {
      ++j;
      seen_to = 0;
    }
  }
  return runs;
}

// Calls visit(box) for boxes, each a begin and end by dim, that follow each other in a tensor of `sizes` and
// make up its elements begin to end - 1, counted along the last dim first.
template <typename Visit>
void for_each_box(const std::vector<int64_t>& sizes, int64_t begin, int64_t end,
                  std::vector<std::pair<int64_t, int64_t>>& box, const Visit& visit) {
  const size_t dim = box.size();
  if (dim == sizes.size()) {
    visit(box);
    return;
  }
  int64_t row = 1;
  for (size_t inner = dim + 1; inner < sizes.size(); ++inner) {
    row *= sizes[inner];
  }
  while (begin < end) {
    const int64_t index = begin / row;
    const bool is_whole_row = begin % row == 0 && end - begin >= row;
    const int64_t next = is_whole_row ? end / row * row : std::min(end, (index + 1) * row);
    box.emplace_back(index, is_whole_row ? end / row : index + 1);
    const int64_t inner_begin = is_whole_row ? 0 : begin - index * row;
    const int64_t inner_end = is_whole_row ? row : next - index * row;
    for_each_box(sizes, inner_begin, inner_end, box, visit);
    box.pop_back();
    begin = next;
  }
}

// The blocks of a message: copies between a local tensor with the indices `held` and the flat buffer.
TransferPart::Peer peer_of(const TransferMessage& message, const std::vector<Intervals>& held, bool is_sent,
                           int64_t group_rank) {
  TransferPart::Peer peer{group_rank, {}, message.size};
  std::vector<Intervals> places;
  std::vector<int64_t> sizes;
  std::vector<int64_t> local_shape;
  for (size_t dim = 0; dim < held.size(); ++dim) {
    places.push_back(positions(message.indices[dim], held[dim]));
    sizes.push_back(num_indices(places.back()));
    local_shape.push_back(num_indices(held[dim]));
  }
  std::vector<std::pair<int64_t, int64_t>> box;
  for_each_box(sizes, message.begin, message.begin + message.size, box, [&](const auto& bounds) {
    std::vector<std::vector<Run>> runs;
    std::vector<int64_t> block_shape;
    for (size_t dim = 0; dim < bounds.size(); ++dim) {
      const auto [begin, end] = bounds[dim];
      const auto in_local = sublist(places[dim], begin, end);
      const Intervals in_block{{0, end - begin}};
      runs.push_back(is_sent ? runs_between(in_local, in_block) : runs_between(in_block, in_local));
      block_shape.push_back(end - begin);
    }
    peer.blocks.emplace_back(std::move(runs), is_sent ? local_shape : block_shape,
                             is_sent ? block_shape : local_shape);
  });
  return peer;
}

// The ranks of a group: their numbers in the world with those in the group, ascending.
std::vector<std::pair<int64_t, int64_t>> sorted_ranks(const TransferGroup& group) {
  std::vector<std::pair<int64_t, int64_t>> ranks;
  for (const int64_t rank : group.ranks) {
    ranks.emplace_back(rank, std::ssize(ranks));
  }
  std::ranges::sort(ranks);
  return ranks;
}

using TransferParts = std::vector<std::shared_ptr<const TransferPart>>;
using Peers = const std::vector<TransferPart::Peer>& (TransferPart::*)() const;

// The flat buffer of a collective: for each rank of the group a segment with the blocks of all tensors.
struct PeerSegments {
  PeerSegments(const TransferParts& parts, Peers peers, size_t num_ranks)
      : sizes(num_ranks), begins(num_ranks) {
    for (const auto& part : parts) {
      for (const auto& peer : ((*part).*peers)()) {
        sizes[peer.rank] += peer.numel;
      }
    }
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      begins[rank] = numel;
      numel += sizes[rank];
    }
  }

  std::vector<int64_t> sizes;  // by group rank
  std::vector<int64_t> begins;
  int64_t numel = 0;
};

// Calls copy(tensor number, block, begin in the buffer) for all blocks of a buffer.
template <typename Copy>
void for_each_block(const TransferParts& parts, Peers peers, std::vector<int64_t> begins, const Copy& copy) {
  for (size_t i = 0; i < parts.size(); ++i) {
    for (const auto& peer : ((*parts[i]).*peers)()) {
      for (const auto& block : peer.blocks) {
        copy(i, block, begins[peer.rank]);
        begins[peer.rank] += block.numel();
      }
    }
  }
}

// Packs the tensors into `sent`, which is replaced if it is too small, and starts their collective.
Start start_together(const TransferParts& parts, const std::vector<at::Tensor>& locals, at::Tensor& sent) {
  const BelowAutograd below_autograd;
  const auto& transport = *parts[0]->group();
  const PeerSegments segments(parts, &TransferPart::sent, transport.ranks.size());
  const PeerSegments received(parts, &TransferPart::received, transport.ranks.size());
  BoxCopies copies;
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < parts.size(); ++i) {
    sources.push_back(contiguous_input(locals[i]));
    outputs.push_back(fresh_tensor(parts[i]->shape_after(), locals[i]));
    if (const auto& block = parts[i]->kept()) {
      copies.add(*block, sources[i], 0, outputs[i], 0);
    }
  }
  if (std::ranges::none_of(parts, [](const auto& part) { return part->communicates(); })) {
    copies.flush();
    return {kRedistribute, {}, {}, {}, std::move(outputs), {}};
  }
  if (!sent.defined() || sent.numel() < segments.numel || sent.scalar_type() != locals[0].scalar_type() ||
      sent.device() != locals[0].device()) {
    sent = fresh_tensor({segments.numel}, locals[0]);
  }
  const auto flat = sent.narrow(0, 0, segments.numel);
  for_each_block(
      parts, &TransferPart::sent, segments.begins,
      [&](size_t i, const BoxCopy& block, int64_t begin) { copies.add(block, sources[i], 0, flat, begin); });
  copies.flush();
  const auto group = group_from_ivalue(transport.group, kRedistribute);
  auto start = transport.has_others ? start_exchange_in_pairs(flat, received.sizes, segments.sizes, group)
                                    : start_all_to_all(flat, received.sizes, segments.sizes, group);
  start.buffers.push_back(std::move(start.outputs[0]));
  start.outputs = std::move(outputs);
  start.epilogue = [parts, begins = received.begins](const Start& done) {
    BoxCopies unpacked;
    for_each_block(parts, &TransferPart::received, begins,
                   [&](size_t i, const BoxCopy& block, int64_t begin) {
                     unpacked.add(block, done.buffers.back(), begin, done.outputs[i], 0);
                   });
    unpacked.flush();
  };
  return start;
}

}  // namespace

TransferPart::TransferPart(const Transfer& transfer, std::shared_ptr<const TransferGroup> group, int64_t rank)
    : group_(std::move(group)), communicates_(transfer.loads.total > 0) {
  const auto& task = transfer.task;
  const auto held = indices_at(task.src_mesh, task.src, task.shape, rank);
  const auto wanted = indices_at(task.dst_mesh, task.dst, task.shape, rank);
  shape_after_ = shape_of(wanted);
  const auto ranks = sorted_ranks(*group_);
  const auto in_group = [&](int64_t other) {
    return std::ranges::lower_bound(ranks, std::pair(other, int64_t{0}))->second;
  };
  const auto messages = messages_of(task, rank);
  for (const auto& message : messages.sent) {
    if (message.sender == rank) {
      sent_.push_back(peer_of(message, *held, /*is_sent=*/true, in_group(message.receiver)));
    } else {
      received_.push_back(peer_of(message, *wanted, /*is_sent=*/false, in_group(message.sender)));
    }
  }
  std::ranges::sort(sent_, {}, &Peer::rank);
  std::ranges::sort(received_, {}, &Peer::rank);
  for (const auto& message : messages.kept) {
    std::vector<std::vector<Run>> runs;
    for (size_t dim = 0; dim < task.shape.size(); ++dim) {
      runs.push_back(runs_between(positions(message.indices[dim], (*held)[dim]),
                                  positions(message.indices[dim], (*wanted)[dim])));
    }
    kept_.emplace(std::move(runs), shape_of(held), shape_after_);
  }
}

StartedTransfers::StartedTransfers(std::vector<TransferItem> items, const at::Tensor& scratch)
    : sent_(scratch) {
  TransferParts parts;
  std::vector<at::Tensor> locals;
  for (auto& item : items) {
    parts.push_back(std::move(item.part));
    locals.push_back(std::move(item.local));
  }
  auto start = start_together(parts, locals, sent_);
  results_ = start.outputs;
  if (start.work) {
    pending_ = hold(std::move(start));
  }
}

std::vector<at::Tensor> StartedTransfers::results(bool async_op) {
  if (pending_ && !async_op) {
    pending_->settle();
    pending_.reset();
  } else if (pending_) {
    for (auto& result : results_) {
      result = AsyncTensorImpl::wrap(result, pending_);
    }
  }
  return std::move(results_);
}

}  // namespace funcol
