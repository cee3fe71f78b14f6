// Many weights at once, for Python: whole tensors one by one, and tensors on owners.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "bindings/bindings.h"
#include "pyobjects/dtypes.h"
#include "transfer/dtensors/full_tensor_stream.h"
#include "transfer/dtensors/owner_transfer.h"
#include "transfer/dtensors/rank_transfer.h"

namespace funcol::python {

void bind_weights(PyObject* module) {
  auto m = py::reinterpret_borrow<py::module>(module);
  m.attr("EVERY_RANK") = kEveryRank;
  m.attr("NO_RANK") = kNoRank;
  py::class_<FullTensorBucket>(m, "FullTensorBucket")
      .def(py::init<>())
      .def(
          "add",
          [](FullTensorBucket& bucket, py::handle dtensor, int64_t holder, py::handle dtype, int64_t most) {
            return bucket.add(dtensor, holder,
                              dtype.is_none() ? std::nullopt : std::optional(to_dtype(dtype)), most);
          },
          py::arg("dtensor"), py::arg("holder"), py::arg("dtype"), py::arg("most"))
      .def("start", &FullTensorBucket::start)
      .def("take", &FullTensorBucket::take);
  m.def(
      "move_to_owners",
      [](const py::list& dtensors, const std::vector<int64_t>& owners, bool async_op,
         std::optional<int64_t> max_bytes) {
        return move_to_owners(dtensors, owners, {async_op, max_bytes});
      },
      py::arg("dtensors"), py::arg("owners"), py::arg("async_op"), py::arg("max_bytes"));
  m.def(
      "move_from_owners",
      [](const py::list& wholes, const py::list& specs, const std::vector<int64_t>& owners,
         const py::list& placements, bool async_op, std::optional<int64_t> max_bytes) {
        return move_from_owners(wholes, specs, owners, placements, {async_op, max_bytes});
      },
      py::arg("wholes"), py::arg("specs"), py::arg("owners"), py::arg("placements"), py::arg("async_op"),
      py::arg("max_bytes"));
}

}  // namespace funcol::python
