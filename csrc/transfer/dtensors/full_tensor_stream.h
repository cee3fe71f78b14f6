// Full tensors of DTensors, many at a time: moved together, taken one by one.
//
// Everything here needs the GIL.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "transfer/bucket.h"

namespace funcol::python {

// DTensors of any meshes and placements, whose full tensors go to every rank, or to one rank.
class FullTensorBucket {
 public:
  // Adds a DTensor. `owner` is the number in the mesh of the rank that gets the full tensor, kEveryRank for
  // all, or kNoRank if take() returns None for it. `dtype` is that of the full tensor, if it is of
  // floating-point numbers; the local tensor is converted before it is sent if that makes it smaller and it
  // is not partial, else afterwards. Returns the bytes that the bucket holds for the tensor on any rank
  // (bytes_of_move), or -1 with nothing done if they are more than `most`. Raises NotImplementedError for
  // masks, norms and symbols, and ValueError if the local tensor does not match its spec.
  int64_t add(py::handle dtensor, int64_t owner, std::optional<at::ScalarType> dtype, int64_t most);

  // Sends everything.
  void start();

  // Returns the next full tensor, or None on a rank that does not get it.
  py::object next();

 private:
  struct Entry {
    bool is_owner = false;  // whether this rank gets the full tensor
    bool is_in_mesh = false;
    std::optional<at::ScalarType> dtype;  // to which the full tensor is converted at the end
  };

  std::vector<Entry> entries_;
  std::vector<TransferItem> items_;  // of the tensors whose mesh has this rank
  std::unique_ptr<Bucket> bucket_;
  size_t num_returned_ = 0;
};

}  // namespace funcol::python
