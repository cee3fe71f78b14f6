#include "transfer/block_transport.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <utility>

#include "async/async_tensor.h"
#include "layout/tensor_meta.h"
#include "ops/layout_change.h"
#include "transfer/selection.h"

namespace funcol {

BlockTransport::BlockTransport(Exchange exchange)
    : exchange_(std::move(exchange)), sent_dim_(equally_sent_dim()), received_dim_(equally_received_dim()) {
  for (const auto& block : exchange_.sent) {
    sent_numels_.push_back(block.numel);
  }
  for (const auto& block : exchange_.received) {
    received_numels_.push_back(block.numel);
  }
}

int64_t BlockTransport::equally_sent_dim() const {
  const auto num_ranks = static_cast<int64_t>(exchange_.sent.size());
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const auto& first = exchange_.sent[0];
    const auto& block = exchange_.sent[rank];
    if (block.selection.size() != 1 || block.selection[0].dim != first.selection[0].dim || block.numel == 0 ||
        block.numel != first.numel) {
      return -1;
    }
    const auto& positions = block.selection[0].positions;
    if (positions.size() != 1 || positions[0].begin != rank * positions[0].size) {
      return -1;
    }
  }
  const int64_t dim = exchange_.sent[0].selection[0].dim;
  const int64_t share = exchange_.sent[0].selection[0].positions[0].size;
  return share * num_ranks == exchange_.shape_before[dim] ? dim : -1;
}

int64_t BlockTransport::equally_received_dim() const {
  const auto num_ranks = static_cast<int64_t>(exchange_.received.size());
  int64_t found = -1;
  for (size_t dim = 0; dim < exchange_.pieces.size(); ++dim) {
    const auto& pieces = exchange_.pieces[dim];
    if (pieces.size() == 1 && pieces[0].is_full) {
      continue;
    }
    if (found != -1 || static_cast<int64_t>(pieces.size()) != num_ranks) {
      return -1;
    }
    found = static_cast<int64_t>(dim);
  }
  std::vector<int64_t> cuts(exchange_.pieces.size(), 0);
  for (int64_t rank = 0; found != -1 && rank < num_ranks; ++rank) {
    const auto& piece = exchange_.pieces[found][rank];
    for (size_t dim = 0; dim < cuts.size(); ++dim) {
      cuts[dim] = exchange_.pieces[dim][static_cast<int64_t>(dim) == found ? rank : 0].cut;
    }
    if (!piece.is_full || exchange_.source(cuts) != rank ||
        exchange_.received[rank].shape != exchange_.received[0].shape) {
      return -1;
    }
  }
  return found;
}

bool BlockTransport::is_complete() const {
  for (size_t dim = 0; dim < exchange_.pieces.size(); ++dim) {
    int64_t size = 0;
    for (const auto& piece : exchange_.pieces[dim]) {
      size += piece.positions.size;
    }
    if (size != exchange_.shape_after[dim]) {
      return false;
    }
  }
  return true;
}

at::Tensor BlockTransport::pack(const at::Tensor& local) const {
  const auto num_ranks = static_cast<int64_t>(exchange_.sent.size());
  if (sent_dim_ != -1) {
    const int64_t share = exchange_.shape_before[sent_dim_] / num_ranks;
    return local.unflatten(sent_dim_, {num_ranks, share}).movedim(sent_dim_, 0).reshape({-1}).contiguous();
  }
  std::vector<at::Tensor> blocks;
  for (const auto& block : exchange_.sent) {
    if (block.numel > 0) {
      blocks.push_back(select(local, block.selection).reshape({-1}));
    }
  }
  if (blocks.empty()) {
    return local.new_empty({0});
  }
  // A column is flattened to a view with a stride, which all_to_all_single of older PyTorch refuses.
  return blocks.size() == 1 ? blocks.front().contiguous() : at::cat(blocks);
}

at::Tensor BlockTransport::unpack(const at::Tensor& received) const {
  if (num_elements(exchange_.shape_after) == 0) {
    return received.view(exchange_.shape_after);
  }
  if (received_dim_ != -1) {
    const auto num_ranks = static_cast<int64_t>(exchange_.received.size());
    auto shape = exchange_.received[0].shape;
    shape.insert(shape.begin(), num_ranks);
    return received.view(shape).movedim(0, received_dim_).reshape(exchange_.shape_after);
  }
  std::vector<int64_t> cuts;
  Selection selection;
  return assemble(received_blocks(received), cuts, selection);
}

std::vector<at::Tensor> BlockTransport::received_blocks(const at::Tensor& received) const {
  auto blocks = received.split_with_sizes(received_numels_);
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    if (exchange_.received[rank].numel > 0) {
      blocks[rank] = blocks[rank].view(exchange_.received[rank].shape);
    }
  }
  return blocks;
}

at::Tensor BlockTransport::pack_plain(const at::Tensor& local) const {
  settle(local);
  if (sent_dim_ == -1 || is_rank_major(local.sizes(), sent_dim_)) {
    return pack(local);
  }
  return split_shards(local, static_cast<int64_t>(exchange_.sent.size()), sent_dim_).view({-1});
}

bool BlockTransport::unpacks_to_view() const {
  if (num_elements(exchange_.shape_after) == 0) {
    return true;
  }
  if (received_dim_ != -1) {
    return is_rank_major(exchange_.shape_after, received_dim_);
  }
  return std::ranges::all_of(exchange_.pieces,
                             [](const auto& pieces) { return pieces.size() == 1 && pieces[0].is_full; });
}

void BlockTransport::unpack_into(const at::Tensor& received, const at::Tensor& out) const {
  if (received_dim_ != -1) {
    merge_shards(received, out, static_cast<int64_t>(exchange_.received.size()), received_dim_);
    return;
  }
  std::vector<int64_t> cuts;
  Selection selection;
  fill(out, received_blocks(received), cuts, selection);
}

// Assembles the blocks like assemble(), but into `out`.
void BlockTransport::fill(const at::Tensor& out, const std::vector<at::Tensor>& blocks,
                          std::vector<int64_t>& cuts, Selection& selection) const {
  const size_t dim = cuts.size();
  if (dim == exchange_.pieces.size()) {
    out.copy_(select(blocks[exchange_.source(cuts)], selection));
    return;
  }
  int64_t filled = 0;
  for (const auto& piece : exchange_.pieces[dim]) {
    cuts.push_back(piece.cut);
    selection.push_back({static_cast<int64_t>(dim), {piece.positions}});
    fill(out.narrow(static_cast<int64_t>(dim), filled, piece.positions.size), blocks, cuts, selection);
    selection.pop_back();
    cuts.pop_back();
    filled += piece.positions.size;
  }
}

// Returns the part of the new tensor whose first dims come from `cuts` and, within those blocks, from
// `selection`.
at::Tensor BlockTransport::assemble(const std::vector<at::Tensor>& blocks, std::vector<int64_t>& cuts,
                                    Selection& selection) const {
  const size_t dim = cuts.size();
  if (dim == exchange_.pieces.size()) {
    return select(blocks[exchange_.source(cuts)], selection);
  }
  std::vector<at::Tensor> parts;
  for (const auto& piece : exchange_.pieces[dim]) {
    cuts.push_back(piece.cut);
    if (!piece.is_full) {
      selection.push_back({static_cast<int64_t>(dim), {piece.positions}});
    }
    parts.push_back(assemble(blocks, cuts, selection));
    if (!piece.is_full) {
      selection.pop_back();
    }
    cuts.pop_back();
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts, static_cast<int64_t>(dim));
}

}  // namespace funcol
