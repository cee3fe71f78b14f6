#include "pyobjects/spec_methods.h"

#include "pyobjects/attributes.h"

namespace funcol::python {
namespace {

PyObject* stock_equals = nullptr;
PyObject* stock_hash = nullptr;

py::object fields_of(PyObject* spec) {
  auto fields = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(spec, nullptr));
  PyErr_Clear();  // an object without a dict: PyTorch compares it
  return fields;
}

enum class Answer { kEqual, kDifferent, kUnknown };  // an error of Python is set only with kUnknown

template <AttributeName name>
Answer compare_field(const py::object& one, const py::object& other) {
  auto* const value = PyDict_GetItemWithError(one.ptr(), interned<name>());
  auto* const its_value = PyDict_GetItemWithError(other.ptr(), interned<name>());
  if (value == nullptr || its_value == nullptr) {
    return Answer::kUnknown;
  }
  if (value == its_value) {
    return Answer::kEqual;
  }
  const int is_equal = PyObject_RichCompareBool(value, its_value, Py_EQ);
  return is_equal < 0 ? Answer::kUnknown : (is_equal == 1 ? Answer::kEqual : Answer::kDifferent);
}

Answer compare(PyObject* one, PyObject* other) {
  if (one == other) {
    return Answer::kEqual;
  }
  if (Py_TYPE(one) != Py_TYPE(other)) {
    return Answer::kUnknown;
  }
  const auto fields = fields_of(one);
  const auto others = fields_of(other);
  if (!fields || !others) {
    return Answer::kUnknown;
  }
  auto answer = compare_field<"mesh">(fields, others);
  answer = answer == Answer::kEqual ? compare_field<"placements">(fields, others) : answer;
  answer = answer == Answer::kEqual ? compare_field<"shard_order">(fields, others) : answer;
  return answer == Answer::kEqual ? compare_field<"tensor_meta">(fields, others) : answer;
}

PyObject* equals(PyObject* self, PyObject* other) {
  const auto answer = compare(self, other);
  if (answer != Answer::kUnknown) {
    return PyBool_FromLong(answer == Answer::kEqual ? 1 : 0);
  }
  return PyErr_Occurred() ? nullptr : PyObject_CallFunctionObjArgs(stock_equals, self, other, nullptr);
}

PyObject* hash(PyObject* self, PyObject*) {
  if (const auto fields = fields_of(self)) {
    auto* const known = PyDict_GetItemWithError(fields.ptr(), interned<"_hash">());
    if (known != nullptr && PyLong_CheckExact(known)) {
      return Py_NewRef(known);
    }
  }
  return PyErr_Occurred() ? nullptr : PyObject_CallFunctionObjArgs(stock_hash, self, nullptr);
}

}  // namespace

std::pair<py::object, py::object> spec_methods(py::object type, py::object equals_of_stock,
                                               py::object hash_of_stock) {
  static PyMethodDef eq_method{"__eq__", equals, METH_O, nullptr};
  static PyMethodDef hash_method{"__hash__", hash, METH_NOARGS, nullptr};
  Py_XSETREF(stock_equals, equals_of_stock.release().ptr());
  Py_XSETREF(stock_hash, hash_of_stock.release().ptr());
  auto* const owner = reinterpret_cast<PyTypeObject*>(type.ptr());
  return {checked(PyDescr_NewMethod(owner, &eq_method)), checked(PyDescr_NewMethod(owner, &hash_method))};
}

}  // namespace funcol::python
