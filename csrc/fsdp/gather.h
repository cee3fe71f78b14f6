// The gather of a group's parameters.
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

// What this rank has of a group, of one type.
struct Shards {
  std::vector<at::Tensor> tensors;  // one for each parameter, flat
  std::vector<int64_t> lengths;
  int64_t length = 0;  // of all
  py::object dtype;    // to gather them in
};

// Nothing for what is uncommon.
std::optional<Shards> find_shards(const Params& params);

// For each parameter a list of one, as FSDP2 keeps types and lengths of what it gathers.
py::list listed_types(const Shards& shards);
py::list listed_lengths(const Shards& shards);
py::list all_lengths(const Shards& shards);

// Copies the shards to where this rank's part of `output` is, which is returned.
at::Tensor copy_in(const std::vector<at::Tensor>& shards, const std::vector<int64_t>& lengths,
                   const at::Tensor& output, int64_t rank);

// The gathered tensor of each parameter.
class GatheredTensors {
 public:
  // `types` and `lengths` are lists of lists, as above, of what lies in `buffer`. No references are taken.
  GatheredTensors(const Params& params, PyObject* types, PyObject* lengths, const at::Tensor& buffer,
                  int64_t num_ranks)
      : params_(params), types_(types), lengths_(lengths), buffer_(buffer), num_ranks_(num_ranks) {}

  // False if one is of an uncommon kind.
  bool find();

  // Makes those that are not there yet and cuts the buffer into all.
  void fill();

 private:
  void copy_memory() const;
  void copy_tensors() const;

  const Params& params_;
  PyObject* types_;
  PyObject* lengths_;
  const at::Tensor& buffer_;
  int64_t num_ranks_;
  std::vector<int64_t> shard_lengths_;
  std::vector<py::object> outputs_;
  std::vector<at::Tensor> tensors_;
};

// Gives every module the sharded parameters of the group, and frees the gathered ones. They have to be
// free_gathered_only().
void to_sharded(const Group& group);

// Gives every module the gathered parameters.
void to_unsharded(const Group& group);

// Of a list of FSDPParams: the flat shards to gather, the type to gather them in, and what AllGatherResult
// keeps of them: types and lengths in a list a parameter, and all lengths.
py::object shards_of(py::handle fsdp_params);

// The part of `output` that this rank sends, which has the shards now.
py::object copied_in(const py::list& flat_shards, py::handle output, py::handle lengths, int64_t rank);

// Cuts the gathered buffer into the parameters' gathered tensors; None.
py::object copy_out(py::handle fsdp_params, py::handle gathered_buffer, py::handle types, py::handle lengths,
                    int64_t num_ranks);

// FSDPParamGroup._to_sharded and _to_unsharded; None.
py::object make_sharded(py::handle fsdp_group);
py::object make_unsharded(py::handle fsdp_group);

}  // namespace funcol::python
