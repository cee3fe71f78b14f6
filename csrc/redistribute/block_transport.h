// Blocks of an exchange: from a rank's tensor to what it sends, and from what it gets to its new tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "redistribute/blocks.h"

namespace funcol {

// Packs and unpacks what one rank sends and gets in an exchange, in flat tensors with a block a rank, in rank
// order.
class BlockTransport {
 public:
  explicit BlockTransport(Exchange exchange);

  const std::vector<int64_t>& sent_numels() const { return sent_numels_; }
  const std::vector<int64_t>& received_numels() const { return received_numels_; }

  // The blocks make up all of the new tensor.
  bool is_complete() const;

  // At most one copy where the blocks are equal shares of one dim, none where one block is the whole tensor.
  // By operators that every layer of PyTorch sees.
  at::Tensor pack(const at::Tensor& local) const;
  at::Tensor unpack(const at::Tensor& received) const;

  // The same for plain tensors, in one pass over the data: pack_plain() waits for `local`; unpack_into()
  // fills the contiguous `out`, of shape_after().
  at::Tensor pack_plain(const at::Tensor& local) const;
  void unpack_into(const at::Tensor& received, const at::Tensor& out) const;

  // What was received is the new tensor as it lies, so that unpack() gives a view.
  bool unpacks_to_view() const;
  const std::vector<int64_t>& shape_after() const { return exchange_.shape_after; }

 private:
  int64_t equally_sent_dim() const;
  int64_t equally_received_dim() const;
  at::Tensor assemble(const std::vector<at::Tensor>& blocks, std::vector<int64_t>& cuts,
                      Selection& selection) const;

  void fill(const at::Tensor& out, const std::vector<at::Tensor>& blocks, std::vector<int64_t>& cuts,
            Selection& selection) const;
  std::vector<at::Tensor> received_blocks(const at::Tensor& received) const;

  Exchange exchange_;
  std::vector<int64_t> sent_numels_;
  std::vector<int64_t> received_numels_;
  // The dim whose equal shares in rank order the blocks are; -1 if they are no such shares.
  int64_t sent_dim_;
  int64_t received_dim_;
};

}  // namespace funcol
