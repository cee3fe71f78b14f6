// The gradients of a group's parameters.
//
// Everything here needs the GIL. Functions that give Python's objects give null, with nothing done, for what
// PyTorch's own function has to do (see fsdp/objects.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/objects.h"

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

// Of an FSDPParamGroup: the parameters that have a gradient to reduce and these gradients, which are taken
// from them.
py::object taken_gradients(py::handle fsdp_group);

// The sizes of a list of gradients, dim 0 made a multiple of the number of ranks.
py::object padded_sizes(py::handle fsdp_params, py::handle gradients, int64_t num_ranks);

// As gradient_type().
py::object common_gradient_type(py::handle fsdp_params);

// The DTensor of a parameter's sharded gradient.
py::object sharded_gradient(py::handle fsdp_param, py::handle local_object);

// As accumulate(), `sizes` being those of padded_sizes(); None.
py::object accumulate_sharded(py::handle buffer, py::handle fsdp_params, py::handle sizes, int64_t num_ranks);

// As copy_gradients_in(); None.
py::object copied_gradients(py::handle gradients_object, py::handle buffer_object, int64_t num_ranks);

}  // namespace funcol::python
