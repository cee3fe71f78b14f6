// The gradients of a group's parameters.
//
// Everything here needs the GIL. Functions that return Python objects return null, with nothing done, where
// PyTorch's own function has to run (see fsdp/param_group_view.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "fsdp/param_group_view.h"

namespace funcol::python {

// Parameters that have a gradient to reduce, and their gradients.
struct Gradients {
  py::list params;
  py::list tensors;
};

// Takes the gradients from the group's parameters. Returns nullopt, with nothing taken, if zeros may have to
// be reduced in place of missing gradients.
std::optional<Gradients> take_gradients(const Group& group);

// Lets autograd leave gradients in the dtype of the computation if `deferred`, while the backward pass of the
// group's parameters runs. Otherwise, after the pass, casts the gradients that are kept to the dtype in which
// they accumulate.
//
// PyTorch counterpart: FSDPParamGroup._set_unsharded_grad_dtypes.
void set_gradient_types(const Fields& group, bool deferred);

// Returns the gradients if copy_gradients_in() can copy them into a buffer of dtype `type`, else nullopt.
std::optional<std::vector<at::Tensor>> plain_gradients(const py::list& gradients, at::ScalarType type,
                                                       int64_t num_ranks);

// Copies gradients into `buffer`, the input of a reduce_scatter, for which is_small_on_cpu() holds: the first
// rank's rows of every gradient, then the second rank's, and so on, padded with zeros. Floating-point
// gradients of another dtype are cast.
void copy_gradients_in(const std::vector<at::Tensor>& gradients, const at::Tensor& buffer, int64_t num_ranks);

// Copies gradients into `buffer` by copy_gradients_in(). Returns false, with nothing done, if it cannot.
bool try_copy_gradients_in(const py::list& gradients, py::handle buffer, int64_t num_ranks);

// Returns the number of elements of a gradient whose dim 0 is padded to a multiple of the number of ranks.
int64_t padded_length(const at::Tensor& gradient, int64_t num_ranks);

// Returns true if the sharded gradients that the parameters have are DTensors.
bool gradients_are_dtensors(const Params& params);

// Returns the dtype of the reduction if the group has none: the dtype in which the gradients accumulate.
// Returns null if they have several.
//
// PyTorch counterpart: FSDPParamGroup._get_reduce_dtype.
py::object common_accumulated_type(const Gradients& taken);

// Accumulates the reduced gradients into the parameters. They lie in `buffer` one after another, of `lengths`
// elements. Gradients of parameters that are offloaded to the CPU are copied there. `record_event()` returns
// an event after all copies so far; without it no parameter may be offloaded.
void accumulate(const at::Tensor& buffer, std::span<const Fields> params, std::span<const int64_t> lengths,
                const std::function<py::object()>& record_event = nullptr);

// Runs take_gradients() on an FSDPParamGroup. Returns (parameters, gradients).
py::object fsdp_take_gradients(py::handle fsdp_group);

// Returns the sizes of a list of gradients, with dim 0 padded to a multiple of the number of ranks.
py::object fsdp_padded_sizes(py::handle fsdp_params, py::handle gradients, int64_t num_ranks);

// Returns the dtype of the sharded gradients of a list of FSDPParams, or None if they have that of the
// reduction. Returns null if the dtypes differ, a parameter is offloaded, or gradients_are_dtensors() is
// false.
py::object fsdp_gradient_type(py::handle fsdp_params);

// Returns the DTensor of a parameter's sharded gradient.
py::object fsdp_sharded_dtensor(py::handle fsdp_param, py::handle local_object);

// Runs accumulate() with the `sizes` of fsdp_padded_sizes(). Returns None.
py::object fsdp_accumulate(py::handle buffer, py::handle fsdp_params, py::handle sizes, int64_t num_ranks);

// Runs try_copy_gradients_in(). Returns None.
py::object fsdp_reduce_copy_in(py::handle gradients, py::handle buffer, int64_t num_ranks);

}  // namespace funcol::python
