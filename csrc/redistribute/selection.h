// Boxes of tensors, and blocks for an exchange, by operators that every layer of PyTorch sees.
#pragma once

#include <ATen/core/Tensor.h>

#include "redistribute/blocks.h"

namespace funcol {

// The box of `tensor`: a view where each dim takes one run of positions, else a copy.
at::Tensor select(const at::Tensor& tensor, const Selection& selection);
bool select_copies(const Selection& selection);

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
  at::Tensor pack(const at::Tensor& local) const;
  at::Tensor unpack(const at::Tensor& received) const;

 private:
  int64_t equally_sent_dim() const;
  int64_t equally_received_dim() const;
  at::Tensor assemble(const std::vector<at::Tensor>& blocks, std::vector<int64_t>& cuts,
                      Selection& selection) const;

  Exchange exchange_;
  std::vector<int64_t> sent_numels_;
  std::vector<int64_t> received_numels_;
  // The dim whose equal shares in rank order the blocks are; -1 if they are no such shares.
  int64_t sent_dim_;
  int64_t received_dim_;
};

}  // namespace funcol
