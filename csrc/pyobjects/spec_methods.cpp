#include "pyobjects/spec_methods.h"

#include <algorithm>

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

struct PlacementClass {
  PyTypeObject* type;
  PyObject* equals;  // PyTorch's method
};

std::vector<PlacementClass> placement_classes;  // under the GIL; their references are never released

const PlacementClass* class_of(PyTypeObject* type) {
  const auto found = std::find_if(placement_classes.begin(), placement_classes.end(),
                                  [&](const PlacementClass& one) { return one.type == type; });
  return found == placement_classes.end() ? nullptr : &*found;
}

PyObject* equals_placement(PyObject* self, PyObject* other) {
  const auto* const own = class_of(Py_TYPE(self));
  if (own != nullptr && Py_TYPE(self) != Py_TYPE(other) && class_of(Py_TYPE(other)) != nullptr) {
    Py_RETURN_FALSE;
  }
  for (auto* type = Py_TYPE(self); type != nullptr; type = type->tp_base) {  // a program's subclass
    if (const auto* const one = class_of(type)) {
      return PyObject_CallFunctionObjArgs(one->equals, self, other, nullptr);
    }
  }
  Py_RETURN_NOTIMPLEMENTED;
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

std::vector<py::object> placement_methods(const std::vector<py::object>& types,
                                          const std::vector<py::object>& equals) {
  static PyMethodDef method{"__eq__", equals_placement, METH_O, nullptr};
  std::vector<py::object> methods;
  for (size_t i = 0; i < types.size(); ++i) {
    auto* const type = reinterpret_cast<PyTypeObject*>(types[i].ptr());
    if (class_of(type) == nullptr) {
      types[i].inc_ref();
      placement_classes.push_back({type, equals.at(i).inc_ref().ptr()});
    }
    methods.push_back(checked(PyDescr_NewMethod(type, &method)));
  }
  return methods;
}

}  // namespace funcol::python
