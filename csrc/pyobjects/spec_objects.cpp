#include "pyobjects/spec_objects.h"

#include <c10/util/Exception.h>

#include "pyobjects/attributes.h"

namespace funcol::python {
namespace {

// Compares values where the placements are of known kinds: Python's comparison takes ten times as long.
bool are_same_placements(const py::object& one, const py::object& other) {
  if (one.is(other)) {
    return true;
  }
  try {
    return to_placements(one) == to_placements(other);
  } catch (const c10::Error&) {
    return are_equal(one, other);
  }
}

}  // namespace

bool are_equal(const py::object& one, const py::object& other) {
  const int result = one.is(other) ? 1 : PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
  if (result < 0) {
    throw py::error_already_set();
  }
  return result == 1;
}

bool hold_alike(py::handle spec, py::handle other) {
  return spec.is(other) ||
         (are_same_placements(attribute<"placements">(spec), attribute<"placements">(other)) &&
          are_equal(attribute<"shard_order">(spec), attribute<"shard_order">(other)));
}

bool read_ints(py::handle tuple, std::vector<int64_t>& numbers) {
  if (!PyTuple_Check(tuple.ptr())) {
    return false;
  }
  const auto count = PyTuple_GET_SIZE(tuple.ptr());
  numbers.resize(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto* const number = PyTuple_GET_ITEM(tuple.ptr(), i);
    if (!PyLong_CheckExact(number)) {
      return false;
    }
    numbers[i] = PyLong_AsLongLong(number);
  }
  return true;
}

py::object meta_of(py::handle spec, const char* op) {
  auto meta = attribute<"tensor_meta">(spec);
  TORCH_CHECK_VALUE(
      !meta.is_none(), "funcol::", op,
      ": the source spec has no tensor_meta, so the shape of the whole tensor is not known. Pass a "
      "DTensorSpec with tensor_meta.");
  return meta;
}

std::vector<int64_t> shape_of(py::handle spec, const char* op) {
  const auto shape = attribute<"shape">(meta_of(spec, op));
  std::vector<int64_t> sizes;
  for (const auto& size : py::reinterpret_borrow<py::sequence>(shape)) {
    sizes.push_back(PyLong_CheckExact(size.ptr()) ? PyLong_AsLongLong(size.ptr())
                                                  : py::int_(size).cast<int64_t>());
  }
  return sizes;
}

}  // namespace funcol::python
