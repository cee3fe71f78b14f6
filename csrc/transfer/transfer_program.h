// The program by which one rank moves a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transfer/executor.h"
#include "transfer/packed_exchange.h"

namespace funcol {

using ExecutionPtr = std::shared_ptr<const Execution>;

// A plan prepared for this rank: its parts in order, any of which may be missing. All are missing on a rank
// outside of both meshes.
struct TransferProgram {
  TransferProgram() = default;
  // Makes a program within one mesh.
  explicit TransferProgram(ExecutionPtr steps) : before(std::move(steps)), bytes(before->peak_bytes()) {}

  void set_exchange(PackedExchange with_peers);
  size_t heap_bytes() const;

  ExecutionPtr before;                             // on the mesh that the tensor comes from
  std::shared_ptr<const PackedExchange> exchange;  // of ranks that hold it with ranks that get it
  SharedSignature exchange_id;                     // equal for exchanges that one collective can do
  ExecutionPtr after;                              // on the mesh that it goes to
  int64_t bytes = 0;                               // the most memory that a rank needs; equal on all ranks
  // Between meshes, this rank's shape, which `before` need not check; nullopt outside of the first mesh.
  std::optional<std::vector<int64_t>> shape_before;
  std::string src;  // the layout before, as text, for messages
};
using TransferProgramPtr = std::shared_ptr<const TransferProgram>;

// A tensor and the program that moves it. `masks` has the operations of this tensor's masked partials alone.
struct TransferItem {
  TransferProgramPtr program;
  at::Tensor local;  // on a rank outside of the first mesh, any tensor of the dtype and device
  MaskHooks masks = {};
};

}  // namespace funcol
