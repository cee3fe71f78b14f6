#include "pyobjects/op_schemas.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "compat/dtensor_spec.h"
#include "metas/output_metas.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"

// Looks up a key by its hash. CPython exports this function, but declares it in internal headers since 3.13.
extern "C" PyObject* _PyDict_GetItem_KnownHash(PyObject* dict, PyObject* key, Py_hash_t hash);  // NOLINT

namespace funcol::python {

bool is_spec(py::handle object) {
  const auto type = imported<"torch.distributed.tensor._dtensor_spec", "DTensorSpec">();
  return py::type::handle_of(object).is(type) || PyObject_IsInstance(object.ptr(), type.ptr()) == 1;
}

namespace {

Layout read_layout_as_pytorch(py::handle spec) {
  auto layout = SpecObjects(spec).read_with_norms();
  if (layout.order.empty()) {
    layout.order = default_shard_order(layout.placements);
  }
  return layout;
}

std::vector<int64_t> sizes_or_strides(py::handle tuple) {
  std::vector<int64_t> numbers;
  TORCH_CHECK_NOT_IMPLEMENTED(read_ints(tuple, numbers), "funcol::", kPropagateOpSharding,
                              ": a symbolic size.");
  return numbers;
}

TensorMeta read_meta(py::handle spec) {
  const auto meta = attribute<"tensor_meta">(spec);
  TORCH_CHECK_VALUE(PyTuple_Check(meta.ptr()) && PyTuple_GET_SIZE(meta.ptr()) >= 3,
                    "funcol::", kPropagateOpSharding,
                    ": a spec has no tensor_meta: ", std::string(py::str(spec)),
                    ". Pass DTensorSpecs that say what their tensors look like.");
  auto* const dtype = PyTuple_GET_ITEM(meta.ptr(), 2);
  TORCH_CHECK_TYPE(THPDtype_Check(dtype), "funcol::", kPropagateOpSharding,
                   ": the dtype of a tensor_meta is a ", type_name(dtype), ".");
  return {sizes_or_strides(PyTuple_GET_ITEM(meta.ptr(), 0)),
          sizes_or_strides(PyTuple_GET_ITEM(meta.ptr(), 1)), static_cast<Dtype>(to_dtype(dtype))};
}

std::string qualified(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Returns true for a running statistic that a batch norm updates, which its schema does not say.
bool is_running_statistic(const std::string& op, const std::string& argument) {
  constexpr std::array<const char*, 3> kOps = {"aten::native_batch_norm", "aten::cudnn_batch_norm",
                                               "aten::miopen_batch_norm"};
  return std::ranges::find(kOps, op) != kOps.end() &&
         (argument == "running_mean" || argument == "running_var");
}

std::unique_ptr<Operator> describe(const c10::OperatorHandle& handle) {
  auto op = std::make_unique<Operator>(Operator{handle, qualified(handle.operator_name()), {}, {}, {}});
  const auto& schema = handle.schema();
  for (const auto& argument : schema.arguments()) {
    op->defaults.push_back(argument.default_value().has_value()
                               ? to_argument(*argument.default_value(), argument.real_type())
                               : Argument{});
    op->is_written.push_back(
        (!argument.is_out() && argument.alias_info() != nullptr && argument.alias_info()->isWrite()) ||
        is_running_statistic(op->name, argument.name()));
  }
  for (const auto& value : schema.returns()) {
    std::optional<size_t> same;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      if (value.alias_info() != nullptr && value.alias_info()->isWrite() &&
          argument.alias_info() != nullptr && *argument.alias_info() == *value.alias_info()) {
        same = i;
      }
    }
    op->returned.push_back(same);
  }
  op->is_per_element = is_per_element(op->name);
  return op;
}

// A reader of arguments, one after another.
class Reader {
 public:
  Reader(PythonSchema& schema, Reading reading) : schema_(schema), reading_(reading) {}

  // Reads an argument. `is_pinned`: its tensors cannot move.
  Argument read(py::handle object, bool is_pinned) {
    auto* const value = object.ptr();
    if (value == Py_None) {
      return {};
    }
    if (PyBool_Check(value)) {
      return {value == Py_True};
    }
    if (PyLong_Check(value)) {
      int overflow = 0;
      const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
      TORCH_CHECK_NOT_IMPLEMENTED(overflow == 0, "funcol::", kPropagateOpSharding, ": an argument of ",
                                  schema_.op->name, " is an int beyond 64 bits.");
      return {number};
    }
    if (PyFloat_Check(value)) {
      return {PyFloat_AS_DOUBLE(value)};
    }
    if (is_spec(object)) {
      return read_tensor(object, is_pinned);
    }
    if (PyTuple_Check(value) || PyList_Check(value)) {
      Argument::List list;
      for (const auto& element : py::reinterpret_borrow<py::sequence>(object)) {
        list.push_back(read(element, is_pinned));
      }
      return {std::move(list)};
    }
    if (THPDtype_Check(value)) {
      return {static_cast<Dtype>(to_dtype(value))};
    }
    if (THPMemoryFormat_Check(value)) {
      return {static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(value)->memory_format)};
    }
    if (THPLayout_Check(value)) {
      return {static_cast<int64_t>(reinterpret_cast<THPLayout*>(value)->layout)};
    }
    if (PyUnicode_Check(value) || THPDevice_Check(value)) {
      return {std::string(py::str(object))};
    }
    TORCH_CHECK_NOT_IMPLEMENTED(false, "funcol::", kPropagateOpSharding, ": an argument of ",
                                schema_.op->name, " is a ", type_name(value), ".");
  }

  // Reads a value on the dispatcher's stack likewise. Takes the specs of its tensors from `specs`.
  Argument read(const c10::IValue& value, const c10::TypePtr& type, bool is_pinned,
                std::vector<py::object>::const_iterator& specs) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        return to_argument(tensor.item(), c10::NumberType::get());  // as Python sees it
      }
      return tensor.defined() ? read_tensor(*specs++, is_pinned) : Argument{};
    }
    if (!value.isList()) {
      return to_argument(value, type);
    }
    if (type->kind() == c10::TypeKind::OptionalType) {
      return read(value, type->expectRef<c10::OptionalType>().getElementType(), is_pinned, specs);
    }
    Argument::List list;
    for (const c10::IValue& element : value.toListRef()) {
      list.push_back(read(element, type->expectRef<c10::ListType>().getElementType(), is_pinned, specs));
    }
    return {std::move(list)};
  }

  // Notes a tensor given by keyword, for PyTorch's rules.
  void add_keyword(const c10::Argument& argument, py::handle spec) {
    auto& keyword = schema_.keywords.emplace_back(KeywordTensor{argument.name(), std::nullopt, false});
    if (argument.is_out()) {
      keyword.out = Spec{read_meta(spec), read_layout_as_pytorch(spec)};
      keyword.strided_as_order = compat::strided_shards_represent_shard_order(spec);
    }
  }

  // Reads an out= argument, whose layout is that of the result.
  void read_out(py::handle object) {
    TORCH_CHECK_NOT_IMPLEMENTED(!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr()),
                                "funcol::", kPropagateOpSharding, ": ", schema_.op->name,
                                " got a list as an out= argument.");
    if (is_spec(object)) {
      schema_.results.emplace_back(layout_of(object, read_meta(object)));
    } else {
      schema_.results.emplace_back(std::nullopt);
    }
  }

 private:
  Layout layout_of(py::handle spec, const TensorMeta& meta) {
    if (!schema_.mesh) {
      schema_.mesh = attribute<"mesh">(spec);
    }
    auto layout = reading_ == Reading::kAsPyTorch ? read_layout_as_pytorch(spec)
                                                  : read_layout(spec, meta, schema_.op->name);
    if (has_strided_shards(layout) && !schema_.strided_as_order) {
      schema_.strided_as_order = compat::strided_shards_represent_shard_order(spec);
    }
    return layout;
  }

  Argument read_tensor(py::handle spec, bool is_pinned) {
    auto meta = read_meta(spec);
    auto layout = layout_of(spec, meta);
    const TensorNumber number{schema_.call.tensors.size()};
    schema_.call.tensors.push_back(std::move(meta));
    schema_.layouts.push_back(std::move(layout));
    schema_.is_pinned.push_back(is_pinned);
    schema_.tensors.push_back({py::reinterpret_borrow<py::object>(spec), attribute<"mesh">(spec)});
    return {number};
  }

  PythonSchema& schema_;
  Reading reading_;
};

// Gives results the layouts of the arguments that an in-place operator writes to and returns. Layouts of out=
// results are known already.
void require_written_layouts(PythonSchema& schema) {
  const auto& op = *schema.op;
  const auto& arguments = op.handle.schema().arguments();
  for (size_t i = 0; i < op.returned.size(); ++i) {
    const auto& written = op.returned[i];
    if (!written.has_value() || arguments[*written].is_out()) {
      continue;
    }
    const auto& argument = schema.call.arg(arguments[*written].name());
    if (argument.is_tensor()) {
      schema.results.resize(op.returned.size());
      schema.results[i] = schema.layouts[argument.tensor()];
    }
  }
}

// Lets gradients of fused optimizers move if there is no scale: only unscaling writes to them.
void unpin_read_gradients(PythonSchema& schema) {
  const auto& call = schema.call;
  if (!call.has_arg("grads") || !call.has_arg("grad_scale") || !call.arg("grad_scale").is_none()) {
    return;
  }
  for (const auto& gradient : call.arg("grads").list()) {
    schema.is_pinned[gradient.tensor()] = false;
  }
}

// Lets running statistics of batch norms move outside of training: only training writes to them, whatever
// their schemas say.
void unpin_read_statistics(PythonSchema& schema) {
  const auto& call = schema.call;
  if (!call.has_arg("training") || call.arg("training").boolean()) {
    return;
  }
  for (const auto* name : {"running_mean", "running_var"}) {
    if (call.has_arg(name) && call.arg(name).is_tensor()) {
      schema.is_pinned[call.arg(name).tensor()] = false;
    }
  }
}

}  // namespace

const Operator& to_operator(py::handle op_overload) {
  static std::unordered_map<PyObject*, std::unique_ptr<Operator>> operators;
  const auto known = operators.find(op_overload.ptr());
  if (known != operators.end()) {
    return *known->second;
  }
  const auto name = torch::jit::parseName(op_overload.attr("name")().cast<std::string>());
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  TORCH_CHECK_VALUE(handle.has_value(), "funcol::", kPropagateOpSharding, ": ", name.name,
                    " is not an operator of PyTorch.");
  Py_INCREF(op_overload.ptr());  // its address is the key
  auto op = describe(*handle);
  op->hash = PyObject_Hash(op_overload.ptr());
  return *(operators[op_overload.ptr()] = std::move(op));
}

bool lists_operands(py::handle schema_info) {
  return !schema_info.is_none() && attribute<"needs_pytree">(schema_info).is(py::handle(Py_True));
}

PyObject* find_entry(py::handle table, py::handle op_overload) {
  return _PyDict_GetItem_KnownHash(table.ptr(), op_overload.ptr(), to_operator(op_overload).hash);
}

Layout read_layout(py::handle spec, const TensorMeta& meta, const std::string& whose) {
  return make_layout("funcol: a spec of " + whose, to_placements(attribute<"placements">(spec)),
                     to_shard_order(attribute<"shard_order">(spec)), to_mesh(attribute<"mesh">(spec)),
                     meta.num_dims());
}

Spec read_spec(py::handle spec) {
  TORCH_CHECK_TYPE(is_spec(spec), "funcol: got a ", type_name(spec), " where a DTensorSpec belongs.");
  auto meta = read_meta(spec);
  auto layout = read_layout(spec, meta, "a tensor");
  return {std::move(meta), std::move(layout)};
}

Spec read_spec_as_pytorch(py::handle spec) { return {read_meta(spec), read_layout_as_pytorch(spec)}; }

namespace {

void apply_write_constraints(PythonSchema& schema) {
  TORCH_CHECK_VALUE(schema.mesh, "funcol::", kPropagateOpSharding, ": ", schema.call.op,
                    " got no tensor of a mesh among its arguments.");
  require_written_layouts(schema);
  unpin_read_gradients(schema);
  unpin_read_statistics(schema);
}

}  // namespace

PythonSchema read_op_schema(py::handle op_schema, bool moves_keywords, Reading reading) {
  PythonSchema schema;
  schema.op = &to_operator(attribute<"op">(op_schema));
  schema.call.op = schema.op->name;
  const auto args = attribute<"args_schema">(op_schema).cast<py::sequence>();
  const auto kwargs = attribute<"kwargs_schema">(op_schema).cast<py::dict>();
  const auto& arguments = schema.op->handle.schema().arguments();
  Reader reader(schema, reading);
  size_t num_read = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    const bool by_position = !argument.kwarg_only() && i < args.size();
    const py::handle value = by_position ? PySequence_Fast_GET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i))
                                         : PyDict_GetItemString(kwargs.ptr(), argument.name().c_str());
    num_read += value ? 1 : 0;
    if (argument.is_out()) {
      reader.read_out(value ? value : py::none());
    } else if (value) {
      const bool is_pinned = schema.op->is_written[i] || !(by_position || moves_keywords);
      schema.call.args.emplace_back(argument.name(), reader.read(value, is_pinned));
    } else {
      schema.call.args.emplace_back(argument.name(), schema.op->defaults[i]);
    }
  }
  TORCH_CHECK_TYPE(num_read == args.size() + kwargs.size(), "funcol::", kPropagateOpSharding, ": ",
                   schema.call.op, " got ", args.size() + kwargs.size(), " arguments, of which it has ",
                   num_read, ".");
  if (reading == Reading::kAsPyTorch) {
    schema.num_positional = args.size();
    schema.lists_operands = python::lists_operands(attribute<"schema_info">(op_schema));
    for (const auto& [name, value] : kwargs) {
      if (is_spec(value)) {
        reader.add_keyword(
            arguments[*schema.op->handle.schema().argumentIndexWithName(name.cast<std::string>())], value);
      }
    }
  }
  apply_write_constraints(schema);
  return schema;
}

PythonSchema read_call_schema(py::handle op_overload, at::ArrayRef<c10::IValue> values,
                              const std::vector<py::object>& specs, bool lists_operands) {
  PythonSchema schema;
  schema.op = &to_operator(op_overload);
  schema.call.op = schema.op->name;
  schema.lists_operands = lists_operands;
  const auto& arguments = schema.op->handle.schema().arguments();
  Reader reader(schema, Reading::kAsPyTorch);
  auto spec = specs.begin();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    schema.num_positional += argument.kwarg_only() ? 0 : 1;
    if (argument.kwarg_only() && values[i].isTensor() && values[i].toTensor().defined()) {
      reader.add_keyword(argument, *spec);
    }
    if (!argument.is_out()) {
      schema.call.args.emplace_back(
          argument.name(), reader.read(values[i], argument.real_type(), schema.op->is_written[i], spec));
    } else if (values[i].isTensor() && values[i].toTensor().defined()) {
      reader.read_out(*spec++);
    } else {
      TORCH_CHECK_NOT_IMPLEMENTED(values[i].isNone(), "funcol::", kPropagateOpSharding, ": ", schema.call.op,
                                  " got a list as an out= argument.");
      reader.read_out(py::none());
    }
  }
  apply_write_constraints(schema);
  return schema;
}

}  // namespace funcol::python
