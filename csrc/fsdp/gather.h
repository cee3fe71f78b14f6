// The gather of a group's parameters.
//
// Everything here needs the GIL. Functions that return Python objects return null, with nothing done, where
// PyTorch's own function has to run (see fsdp/param_group_view.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/param_group_view.h"

namespace funcol::python {

// This rank's shards of a group's parameters. Shards of several dtypes travel as bytes.
struct Shards {
  std::vector<at::Tensor> tensors;    // one for each parameter, flat; on the CPU if they are offloaded
  std::vector<at::ScalarType> types;  // in which they travel
  std::vector<int64_t> lengths;       // in elements of `dtype`
  int64_t length = 0;                 // their sum
  at::ScalarType dtype = at::kByte;   // of the gather
};

// Returns this rank's shards of `params`; returns nullopt if a shard is of an uncommon kind.
std::optional<Shards> find_shards(const Params& params);

// The dtypes and the numbers of elements as AllGatherResult keeps them, each in a list of one item for each
// parameter, and all lengths in one list.
struct ListedShards {
  explicit ListedShards(const Shards& shards);

  py::list types;
  py::list lengths;
  py::list all_lengths;
};

// Casts and copies the shards into this rank's part of `output`, and returns that part.
at::Tensor copy_in(const Shards& shards, const at::Tensor& output, int64_t rank);

// The gathered tensor of each parameter.
class GatheredTensors {
 public:
  // Keeps references to the arguments, which must outlive it. `types` and `lengths` are those of ListedShards
  // for the shards in `buffer`.
  GatheredTensors(const Params& params, PyObject* types, PyObject* lengths, const at::Tensor& buffer,
                  int64_t num_ranks)
      : params_(params), types_(types), lengths_(lengths), buffer_(buffer), num_ranks_(num_ranks) {}

  // Finds the tensors that exist already. Returns false if one is of an uncommon kind.
  bool find();

  // Makes the missing tensors, and copies the buffer's parts into all.
  void fill();

 private:
  void copy_memory() const;
  void copy_tensors() const;

  const Params& params_;
  PyObject* types_;
  PyObject* lengths_;
  const at::Tensor& buffer_;
  int64_t num_ranks_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<int64_t> shard_lengths_;  // in elements of each one's dtype
  std::vector<py::object> outputs_;
  std::vector<at::Tensor> tensors_;
};

// Sets the sharded parameters of the group on its modules, and frees the gathered ones. free_gathered_only()
// has to hold for the parameters.
void to_sharded(const Group& group);

// Sets the gathered parameters on the group's modules.
void to_unsharded(const Group& group);

// Returns (dtype of the gather, the lists of ListedShards) for a list of FSDPParams.
py::object fsdp_shards(py::handle fsdp_params);

// Runs copy_in() for the shards of a list of FSDPParams.
py::object fsdp_copy_in(py::handle fsdp_params, py::handle output, int64_t rank);

// Copies the gathered buffer into the parameters' gathered tensors. Returns None.
py::object fsdp_copy_out(py::handle fsdp_params, py::handle gathered_buffer, py::handle types,
                         py::handle lengths, int64_t num_ranks);

// Replaces FSDPParamGroup._to_sharded and _to_unsharded. Returns None.
py::object fsdp_to_sharded(py::handle fsdp_group);
py::object fsdp_to_unsharded(py::handle fsdp_group);

}  // namespace funcol::python
