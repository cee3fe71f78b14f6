#include "transfer/dtensors/full_tensor_stream.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "async/dispatch_modes.h"
#include "pyobjects/attributes.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"
#include "transfer/dtensors/rank_transfer.h"
#include "transfer/op_names.h"

namespace funcol::python {

int64_t FullTensorBucket::add(py::handle dtensor, int64_t owner, std::optional<at::ScalarType> dtype,
                              int64_t most) {
  const auto spec = attribute<"_spec">(dtensor);
  const SpecObjects objects(spec);
  auto& known = known_mesh(objects.mesh);
  const auto& held = THPVariable_Unpack(attribute<"_local_tensor">(dtensor).ptr());
  TransferKey key{known.id, objects.read()};
  key.owner = owner;
  TORCH_CHECK_NOT_IMPLEMENTED(!belongs_to_layer(held) && !held.is_meta() && !has_masks(key.src) &&
                                  read_ints(attribute<"shape">(meta_of(spec, kFullTensors)), key.shape),
                              "funcol::", kFullTensors,
                              ": masks, symbolic sizes and tensors of a layer do not go with other tensors.");
  auto local = held.detach();
  Entry entry;
  const bool changes =
      dtype.has_value() && at::isFloatingType(local.scalar_type()) && *dtype != local.scalar_type();
  const bool converts_first = changes && c10::elementSize(*dtype) < local.itemsize() &&
                              std::ranges::none_of(key.src.placements, &Placement::is_partial);
  if (changes && !converts_first) {
    entry.dtype = dtype;
  }
  key.itemsize = static_cast<int64_t>(converts_first ? c10::elementSize(*dtype) : local.itemsize());
  entry.is_in_mesh = known.coordinate.has_value() && owner != kNoRank;
  TransferProgramPtr program;
  if (entry.is_in_mesh) {
    program = find_program(key, to_or_from_rank(objects.mesh, known));
  }
  const int64_t bytes = program ? program->bytes : bytes_of_move(key, known.mesh, local.is_cpu());
  if (bytes > most) {
    return -1;
  }
  if (entry.is_in_mesh) {
    entry.is_owner = owner == kEveryRank || owner == known.mesh.place(*known.coordinate);
    if (converts_first) {
      local = local.to(*dtype);
    }
    if (program->before) {
      program->before->check(local);
    }
    items_.push_back({std::move(program), std::move(local)});
  }
  entries_.push_back(entry);
  return bytes;
}

void FullTensorBucket::start() {
  const WithoutGil no_gil;
  const at::NoGradGuard no_grad;
  bucket_ = std::make_unique<Bucket>(std::move(items_));
  bucket_->start();
}

py::object FullTensorBucket::next() {
  const auto& entry = entries_.at(num_returned_++);
  if (!entry.is_in_mesh) {
    return py::none();
  }
  at::Tensor full;
  {
    const WithoutGil no_gil;
    const at::NoGradGuard no_grad;
    full = bucket_->next();
    if (entry.is_owner && entry.dtype.has_value()) {
      full = full.to(*entry.dtype);
    }
  }
  return entry.is_owner ? to_python(std::move(full)) : py::none();
}

}  // namespace funcol::python
