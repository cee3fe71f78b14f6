#include "transfer/transfer_exchange.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "transfer/exchange_plan.h"

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

// Returns the runs from one list of positions to another of the same length.
std::vector<CopyRun> runs_between(const Intervals& from, const Intervals& to) {
  std::vector<CopyRun> runs;
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
// make up its elements begin to end - 1 in row-major order.
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
    const bool is_full_row = begin % row == 0 && end - begin >= row;
    const int64_t next = is_full_row ? end / row * row : std::min(end, (index + 1) * row);
    box.emplace_back(index, is_full_row ? end / row : index + 1);
    const int64_t inner_begin = is_full_row ? 0 : begin - index * row;
    const int64_t inner_end = is_full_row ? row : next - index * row;
    for_each_box(sizes, inner_begin, inner_end, box, visit);
    box.pop_back();
    begin = next;
  }
}

// Adds the blocks of a message with the rank `peer` of the group: copies between a local tensor with the
// indices `held` and the flat buffer.
void add_blocks(const TransferMessage& message, const std::vector<Intervals>& held, bool is_sent,
                int64_t peer, std::vector<PeerBlock>& blocks) {
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
    std::vector<std::vector<CopyRun>> runs;
    std::vector<int64_t> block_shape;
    for (size_t dim = 0; dim < bounds.size(); ++dim) {
      const auto [begin, end] = bounds[dim];
      Intervals in_local;
      append_range(places[dim], begin, end, in_local);
      const Intervals in_block{{0, end - begin}};
      runs.push_back(is_sent ? runs_between(in_local, in_block) : runs_between(in_block, in_local));
      block_shape.push_back(end - begin);
    }
    blocks.push_back({peer, BoxCopy(std::move(runs), is_sent ? local_shape : block_shape,
                                    is_sent ? block_shape : local_shape)});
  });
}

// Returns the ranks of a group, ascending: their numbers in the meshes with those in the group.
std::vector<std::pair<int64_t, int64_t>> sorted_ranks(const TransferGroup& group) {
  std::vector<std::pair<int64_t, int64_t>> ranks;
  for (const int64_t rank : group.ranks) {
    ranks.emplace_back(rank, std::ssize(ranks));
  }
  std::ranges::sort(ranks);
  return ranks;
}

}  // namespace

PackedExchange packed_transfer(const Transfer& transfer, const TransferGroup& group, int64_t rank,
                               bool keeps_in_buffer) {
  const auto& task = transfer.task;
  const auto held = indices_at(task.src_mesh, task.src, task.shape, rank);
  const auto wanted = indices_at(task.dst_mesh, task.dst, task.shape, rank);
  PackedExchange exchange{StepKind::kAllToAll, group.group, std::ssize(group.ranks)};
  exchange.shape_after = shape_of(wanted);
  exchange.communicates = keeps_in_buffer || transfer.loads.total > 0;
  exchange.in_pairs = group.has_others;
  exchange.description =
      c10::str(to_string(task.src), " -> ", to_string(task.dst), " of ", c10::ArrayRef<int64_t>(task.shape));
  const auto ranks = sorted_ranks(group);
  const auto in_group = [&](int64_t other) {
    return std::ranges::lower_bound(ranks, std::pair(other, int64_t{0}))->second;
  };
  const auto messages = messages_of(task, rank);
  const auto send = [&](const TransferMessage& message) {
    add_blocks(message, *held, /*is_sent=*/true, in_group(message.receiver), exchange.sent);
  };
  const auto receive = [&](const TransferMessage& message) {
    add_blocks(message, *wanted, /*is_sent=*/false, in_group(message.sender), exchange.received);
  };
  for (const auto& message : messages.sent) {
    if (message.sender == rank) {
      send(message);
    } else {
      receive(message);
    }
  }
  for (const auto& message : messages.kept) {
    if (keeps_in_buffer) {
      send(message);
      receive(message);
      continue;
    }
    std::vector<std::vector<CopyRun>> runs;
    for (size_t dim = 0; dim < task.shape.size(); ++dim) {
      runs.push_back(runs_between(positions(message.indices[dim], (*held)[dim]),
                                  positions(message.indices[dim], (*wanted)[dim])));
    }
    exchange.kept.emplace(std::move(runs), shape_of(held), exchange.shape_after);
  }
  std::ranges::stable_sort(exchange.sent, {}, &PeerBlock::rank);
  std::ranges::stable_sort(exchange.received, {}, &PeerBlock::rank);
  return exchange;
}

}  // namespace funcol
