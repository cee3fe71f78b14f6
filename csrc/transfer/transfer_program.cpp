#include "transfer/transfer_program.h"

namespace funcol {

void TransferProgram::set_exchange(PackedExchange with_peers) {
  exchange_id = shared_signature(with_peers.signature());
  exchange = std::make_shared<const PackedExchange>(std::move(with_peers));
}

size_t TransferProgram::heap_bytes() const {
  constexpr size_t kExchangeBytes = 2048;  // of its boxes: a block a rank
  return (before ? before->heap_bytes() : 0) + (after ? after->heap_bytes() : 0) +
         (exchange ? kExchangeBytes : 0);
}

}  // namespace funcol
