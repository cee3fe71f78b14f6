#include "redistribute/run_transfer.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "async/async_tensor.h"
#include "async/held_memory.h"
#include "async/pending_collective.h"
#include "comm/orphaned_works.h"
#include "comm/process_group.h"
#include "ops/collectives.h"
#include "ops/exchange.h"
#include "ops/wire.h"
#include "redistribute/blocks.h"
#include "redistribute/box_copies.h"
#include "redistribute/op_names.h"

namespace funcol {
namespace {

// What a rank holds of each dim; nothing on a rank outside of the mesh.
std::optional<std::vector<Intervals>> indices_at(const RankedMesh& mesh, const Layout& layout,
                                                 const std::vector<int64_t>& shape, int64_t rank) {
  const auto found = std::ranges::find(mesh.ranks, rank);
  if (found == mesh.ranks.end()) {
    return std::nullopt;
  }
  Coordinate coordinate(mesh.mesh.sizes.size());
  auto rest = static_cast<int64_t>(found - mesh.ranks.begin());
  for (int64_t axis = mesh.mesh.num_axes() - 1; axis >= 0; --axis) {
    coordinate[axis] = rest % mesh.mesh.sizes[axis];
    rest /= mesh.mesh.sizes[axis];
  }
  std::vector<Intervals> indices;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    indices.push_back(local_indices(layout, mesh.mesh, static_cast<int64_t>(dim), shape[dim], coordinate));
  }
  return indices;
}

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

// Adds the blocks of a message to `peer`: copies between a local tensor with the indices `held` and the flat
// buffer.
void add_blocks(const TransferMessage& message, const TransferRange& range,
                const std::vector<Intervals>& held, bool is_sent, TransferPart::Peer& peer) {
  std::vector<Intervals> places;
  std::vector<int64_t> sizes;
  std::vector<int64_t> local_shape;
  for (size_t dim = 0; dim < held.size(); ++dim) {
    places.push_back(positions(range.indices[dim], held[dim]));
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
  peer.numel += message.size;
}

TransferPart::Peer& peer_of(std::vector<TransferPart::Peer>& peers, int64_t rank) {
  const auto found = std::ranges::lower_bound(peers, rank, {}, &TransferPart::Peer::rank);
  return found != peers.end() && found->rank == rank ? *found : *peers.insert(found, {rank, {}, 0});
}

using TransferParts = std::vector<std::shared_ptr<const TransferPart>>;
using Peers = const std::vector<TransferPart::Peer>& (TransferPart::*)() const;

// The flat buffer of a bundle: for each rank of the group a segment with the blocks of all tensors.
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

// Items that travel together.
struct TransferBundle {
  std::vector<size_t> indices;
  int64_t bytes = 0;
};

// Packs the tensors of a bundle and starts its collective.
Start start_bundle(const TransferParts& parts, const std::vector<at::Tensor>& locals) {
  const BelowAutograd below_autograd;
  const auto& transport = *parts[0]->group();
  const PeerSegments sent(parts, &TransferPart::sent, transport.ranks.size());
  const PeerSegments received(parts, &TransferPart::received, transport.ranks.size());
  BoxCopies copies;
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < parts.size(); ++i) {
    sources.push_back(contiguous_input(locals[i]));
    outputs.push_back(fresh_tensor(parts[i]->shape_after(), locals[i]));
    for (const auto& block : parts[i]->kept()) {
      copies.add(block, sources[i], 0, outputs[i], 0);
    }
  }
  if (!parts[0]->communicates()) {
    copies.flush();
    return {kRedistribute, {}, {}, {}, std::move(outputs), {}};
  }
  const auto flat = fresh_tensor({sent.numel}, locals[0]);
  for_each_block(parts, &TransferPart::sent, sent.begins, [&](size_t i, const BoxCopy& block, int64_t begin) {
    copies.add(block, sources[i], 0, flat, begin);
  });
  copies.flush();
  const auto group = group_from_ivalue(transport.group, kRedistribute);
  auto start = transport.has_others ? start_exchange_in_pairs(flat, received.sizes, sent.sizes, group)
                                    : start_all_to_all(flat, received.sizes, sent.sizes, group);
  start.buffers.push_back(std::move(start.outputs[0]));
  start.outputs = std::move(outputs);
  start.epilogue = [parts, begins = received.begins](const Start& done) {
    BoxCopies received;
    for_each_block(parts, &TransferPart::received, begins,
                   [&](size_t i, const BoxCopy& block, int64_t begin) {
                     received.add(block, done.buffers.back(), begin, done.outputs[i], 0);
                   });
    received.flush();
  };
  return start;
}

// By dtype and by whether anything is sent. Equal on all ranks.
std::vector<TransferBundle> bundles_of(const std::vector<TransferItem>& items, int64_t together_bytes) {
  std::vector<TransferBundle> bundles;
  std::map<std::pair<at::ScalarType, bool>, size_t> open;
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t bytes = items[i].part->peak_bytes();
    const std::pair kind(items[i].local.scalar_type(), items[i].part->communicates());
    const auto found = open.find(kind);
    if (found == open.end() || bundles[found->second].bytes + bytes > together_bytes) {
      open[kind] = bundles.size();
      bundles.emplace_back();
    }
    auto& bundle = bundles[open[kind]];
    bundle.indices.push_back(i);
    bundle.bytes += bytes;
  }
  return bundles;
}

}  // namespace

TransferPart::TransferPart(const Transfer& transfer, std::shared_ptr<const TransferGroup> group, int64_t rank)
    : group_(std::move(group)),
      communicates_(!transfer.messages.empty()),
      peak_bytes_(loads_of(transfer).peak) {
  const auto& task = transfer.task;
  const auto held = indices_at(task.src_mesh, task.src, task.shape, rank);
  const auto wanted = indices_at(task.dst_mesh, task.dst, task.shape, rank);
  shape_after_ = shape_of(wanted);
  std::map<int64_t, int64_t> group_ranks;
  for (size_t place = 0; place < group_->ranks.size(); ++place) {
    group_ranks[group_->ranks[place]] = static_cast<int64_t>(place);
  }
  for (const auto& message : transfer.messages) {
    const auto& range = transfer.ranges[message.range];
    if (message.sender == rank) {
      add_blocks(message, range, *held, /*is_sent=*/true, peer_of(sent_, group_ranks.at(message.receiver)));
    }
    if (message.receiver == rank) {
      add_blocks(message, range, *wanted, /*is_sent=*/false,
                 peer_of(received_, group_ranks.at(message.sender)));
    }
  }
  if (!held.has_value() || !wanted.has_value()) {
    return;
  }
  for (const auto& range : transfer.ranges) {
    if (!std::ranges::binary_search(range.keepers, rank)) {
      continue;
    }
    std::vector<std::vector<Run>> runs;
    for (size_t dim = 0; dim < task.shape.size(); ++dim) {
      runs.push_back(runs_between(positions(range.indices[dim], (*held)[dim]),
                                  positions(range.indices[dim], (*wanted)[dim])));
    }
    kept_.emplace_back(std::move(runs), shape_of(held), shape_after_);
  }
}

std::vector<at::Tensor> run_transfers(const std::vector<TransferItem>& items, bool async_op,
                                      int64_t together_bytes) {
  sweep_some_orphans();
  std::vector<at::Tensor> results(items.size());
  std::vector<std::pair<const TransferBundle*, c10::intrusive_ptr<PendingCollective>>> running;
  const auto bundles = bundles_of(items, together_bytes);
  for (const auto& bundle : bundles) {
    TransferParts parts;
    std::vector<at::Tensor> locals;
    for (const size_t i : bundle.indices) {
      parts.push_back(items[i].part);
      locals.push_back(items[i].local);
    }
    auto start = start_bundle(parts, locals);
    for (size_t i = 0; i < bundle.indices.size(); ++i) {
      results[bundle.indices[i]] = start.outputs[i];
    }
    if (start.work) {
      running.emplace_back(&bundle, hold(std::move(start)));
    }
  }
  for (const auto& [bundle, pending] : running) {
    if (!async_op) {
      pending->settle();
      continue;
    }
    for (const size_t i : bundle->indices) {
      results[i] = AsyncTensorImpl::wrap(results[i], pending);
    }
  }
  return results;
}

}  // namespace funcol
