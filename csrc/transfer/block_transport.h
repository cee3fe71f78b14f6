// Packs a rank's tensor into the buffer that an exchange sends, and unpacks the buffer that it receives.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "transfer/exchange_plan.h"

namespace funcol {

// One rank's buffers in an exchange: flat tensors of one block per rank, in rank order.
class BlockTransport {
 public:
  explicit BlockTransport(Exchange exchange);

  const Exchange& exchange() const { return exchange_; }
  const std::vector<int64_t>& sent_numels() const { return sent_numels_; }
  const std::vector<int64_t>& received_numels() const { return received_numels_; }

  // Returns true if the blocks make up all of the new tensor.
  bool is_complete() const;

  // Packs or unpacks by operators that every layer of PyTorch sees: with at most one copy if the blocks are
  // equal shares of one dim, without any if one block is all of the tensor.
  at::Tensor pack(const at::Tensor& local) const;
  at::Tensor unpack(const at::Tensor& received) const;

  // Does the same for plain tensors, in one pass over the data. pack_plain() waits for `local`; unpack_into()
  // fills the contiguous `out`, of shape_after().
  at::Tensor pack_plain(const at::Tensor& local) const;
  void unpack_into(const at::Tensor& received, const at::Tensor& out) const;

  // Returns true if unpack() returns a view: the received buffer is the new tensor in its memory order.
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
  // The dim of which the blocks are equal shares in rank order; -1 if there is none.
  int64_t sent_dim_;
  int64_t received_dim_;
};

}  // namespace funcol
