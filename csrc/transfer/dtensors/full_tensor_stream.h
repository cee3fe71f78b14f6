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

// DTensors, of any meshes and placements, whose full tensors every rank gets, or one rank.
class FullTensorBucket {
 public:
  // `holder`: the number in the mesh of the rank that gets the full tensor; kEveryRank for all; kNoRank if
  // take() returns None for it. `dtype`: of the full tensor, if it is of floating-point numbers; the local
  // one is converted before it is sent if that makes it smaller and it is not partial, else afterwards.
  // Returns the bytes that the bucket holds for the tensor on any rank (bytes_of_move), or -1 with nothing
  // done if they are more than `most`. NotImplementedError for masks, norms and symbols; ValueError if the
  // local tensor is not what its spec says.
  int64_t add(py::handle dtensor, int64_t holder, std::optional<at::ScalarType> dtype, int64_t most);

  // Sends everything.
  void start();

  // The next whole, or None on a rank that does not get it.
  py::object take();

 private:
  struct Added {
    bool is_here = false;  // whether this rank gets the whole
    bool is_inside = false;
    std::optional<at::ScalarType> dtype;  // what it is converted to at last
  };

  std::vector<Added> added_;
  std::vector<TransferItem> items_;  // of the tensors whose mesh has this rank
  std::unique_ptr<Bucket> bucket_;
  size_t num_taken_ = 0;
};

}  // namespace funcol::python
