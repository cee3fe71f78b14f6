// The gradients of a group and their reduction: see bind_fully_shard.cpp.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/fully_shard_objects.h"

namespace funcol::python {

// Parameters that have a gradient to reduce, and these.
struct Gradients {
  py::list params;
  py::list tensors;
};

// Takes them from the parameters. Nothing, with nothing taken, if zeros may be needed in the place of some.
std::optional<Gradients> take_gradients(const Group& group);

// Whether each rank's rows of these gradients can be laid into a buffer of one memory, element by element.
std::optional<std::vector<at::Tensor>> plain_gradients(const py::list& gradients, at::ScalarType type,
                                                       int64_t num_ranks);

// Lays them into `buffer`, which is small and on the CPU, as a reduce_scatter takes them, padded with zeros:
// of each the first rank's rows, then of each the second rank's.
void copy_gradients_in(const std::vector<at::Tensor>& gradients, const at::Tensor& buffer, int64_t num_ranks);

// Elements of a gradient whose dim 0 has been made a multiple of the number of ranks.
int64_t padded_length(const at::Tensor& gradient, int64_t num_ranks);

// The type that all their sharded gradients have, None if they take any; null if they differ, if some go to
// the CPU from elsewhere or are added to what is no DTensor.
py::object gradient_type(const Params& params);

// Gives each parameter its part of the reduced gradients, which lie in `buffer` one after another, each of
// these lengths.
void accumulate(const at::Tensor& buffer, const Params& params, const std::vector<int64_t>& lengths);

// As PyMethodDef has them, up to an empty one.
PyMethodDef* gradient_functions();
PyMethodDef* reduction_functions();  // in fully_shard_reduction.cpp

}  // namespace funcol::python
