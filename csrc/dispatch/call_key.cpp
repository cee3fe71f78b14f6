#include "dispatch/call_key.h"

#include <ATen/DTensorState.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>
#include <string_view>

#include "metas/output_metas.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/op_schemas.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"

namespace funcol::python {
namespace {

// Tags of words, so that arguments of different types never have equal keys.
enum Tag : uint64_t {
  kUndefined = 1,
  kNone,
  kDTensor,
  kPlain,
  kInt,
  kDouble,
  kBool,
  kSign,
  kText,
  kDevice,
  kList,
  kComplex,
};

bool returns_first(const c10::FunctionSchema& schema) {
  const auto* const returned = schema.returns()[0].alias_info();
  return returned != nullptr && *returned == *schema.arguments()[0].alias_info();
}

bool is_tensor_or_list(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType ||
         (type.kind() == c10::TypeKind::ListType &&
          type.containedType(0)->kind() == c10::TypeKind::TensorType);
}

bool share_memory(const c10::AliasInfo* one, const c10::AliasInfo* other) {
  return one != nullptr && other != nullptr && !one->isWrite() &&
         std::ranges::any_of(one->beforeSets(),
                             [&](const auto& set) { return other->beforeSets().count(set) != 0; });
}

bool is_number(const c10::Type& type) {
  using enum c10::TypeKind;
  return type.kind() == NumberType || type.kind() == BoolType || type.kind() == IntType ||
         type.kind() == FloatType;
}

DescribedOperator::ResultKind result_kind_of(const c10::OperatorHandle& op) {
  using ResultKind = DescribedOperator::ResultKind;
  const auto& schema = op.schema();
  const std::string_view name = schema.name();
  const bool is_in_place = writes_to_first(schema);
  const auto all_are = [&](const auto& kind) {
    return std::ranges::all_of(schema.returns(), [&](const auto& value) { return kind(*value.real_type()); });
  };
  // For aten::equal, PyTorch combines the answers of all ranks.
  if (!schema.returns().empty() && all_are(is_number) && !schema.is_mutable() && name != "aten::equal") {
    return ResultKind::kNumbers;
  }
  if (!all_are(is_tensor_or_list) || op.hasTag(at::Tag::inplace_view) ||
      op.hasTag(at::Tag::data_dependent_output)) {
    return ResultKind::kUnsupported;
  }
  const auto num_out =
      std::ranges::count_if(schema.arguments(), [](const auto& argument) { return argument.is_out(); });
  if (num_out > 0) {
    return num_out == std::ssize(schema.returns()) ? ResultKind::kOut : ResultKind::kUnsupported;
  }
  if (is_in_place && schema.returns().empty()) {
    return ResultKind::kNone;
  }
  if (is_in_place) {
    return schema.returns().size() == 1 && returns_first(schema) ? ResultKind::kFirstArgument
                                                                 : ResultKind::kUnsupported;
  }
  return schema.returns().empty() || schema.is_mutable() ? ResultKind::kUnsupported : ResultKind::kNew;
}

// The static arguments that the propagator's tables name for an operator. find() returns nullopt if they have
// no entry.
struct StaticArguments {
  size_t first = 0;
  py::object keywords;
  bool lists_operands = false;

  static std::optional<StaticArguments> find(py::handle propagator, py::handle overload) {
    for (const auto& table : {find_attribute<"op_to_schema_info">(propagator),
                              find_attribute<"op_to_schema_info_for_single_dim_strategy">(propagator)}) {
      if (!table || !PyDict_Check(table.ptr())) {
        continue;
      }
      const py::handle info = PyDict_GetItemWithError(table.ptr(), overload.ptr());
      if (info && !info.is_none()) {
        return StaticArguments{attribute<"static_argnum">(info).cast<size_t>(),
                               attribute<"static_kwargkey">(info), python::lists_operands(info)};
      }
      PyErr_Clear();
    }
    return std::nullopt;
  }

  bool contains(size_t place, const c10::Argument& argument) const {
    if (!argument.kwarg_only()) {
      return place >= first;
    }
    return !keywords.is_none() && keywords.contains(py::str(argument.name()));
  }
};

// Returns true if an argument scales or shifts values, judged by its name or by its type, float, like that of
// learning rates, momenta and probabilities. Optional floats may scale shapes.
bool is_factor(const c10::Argument& argument) {
  constexpr std::array<std::string_view, 6> kFactors = {"other", "scalar", "scalars",
                                                        "alpha", "beta",   "value"};
  return argument.real_type()->kind() == c10::TypeKind::FloatType ||
         std::ranges::find(kFactors, argument.name()) != kFactors.end();
}

// Returns the value of a real number that PyTorch has wrapped in a tensor.
double number_in(const at::Tensor& wrapped) {
  switch (wrapped.scalar_type()) {
    case at::kDouble:
      return *wrapped.const_data_ptr<double>();
    case at::kLong:
      return static_cast<double>(*wrapped.const_data_ptr<int64_t>());
    default:
      return wrapped.item().toDouble();
  }
}

class CallReader {
 public:
  CallReader(Call& call) : call_(call) {}

  FastPathStatus read(const c10::IValue& value, size_t place, bool is_factor) {
    place_ = place;
    is_factor_ = is_factor;
    return read(value, -1);
  }

 private:
  FastPathStatus read(const c10::IValue& value, int64_t index) {
    if (value.isTensor()) {
      return read_tensor(value.toTensor(), index);
    }
    if (value.isNone()) {
      return add(kNone);
    }
    if (value.isInt()) {
      const auto number = value.toInt();
      return is_factor_ ? add_sign(kInt, number) : add(kInt, std::bit_cast<uint64_t>(number));
    }
    if (value.isDouble()) {
      const auto number = value.toDouble();
      return is_factor_ ? add_sign(kDouble, number) : add(kDouble, std::bit_cast<uint64_t>(number));
    }
    if (value.isComplexDouble()) {
      const auto number = value.toComplexDouble();
      add(kComplex, std::bit_cast<uint64_t>(number.real()));
      return add(kComplex, std::bit_cast<uint64_t>(number.imag()));
    }
    if (value.isBool()) {
      return add(kBool, value.toBool() ? 1 : 0);
    }
    if (value.isList()) {
      return read_all(value.toListRef());
    }
    if (value.isString()) {
      call_.key.words.push_back(kText);
      add_text(call_.key.words, value.toStringRef());
      return FastPathStatus::kHandled;
    }
    if (value.isDevice()) {
      const auto device = value.toDevice();
      return add(kDevice, static_cast<uint64_t>(device.type()) << 16 | static_cast<uint8_t>(device.index()));
    }
    return FastPathStatus::kArgument;
  }

  FastPathStatus read_tensor(const at::Tensor& tensor, int64_t index) {
    if (!tensor.defined()) {
      return add(kUndefined);
    }
    if (!tensor.key_set().has(c10::DispatchKey::Python)) {
      return read_plain(tensor, index);
    }
    auto* const object = dtensor_object(tensor);
    if (object == nullptr) {
      return FastPathStatus::kArgument;
    }
    auto* const spec = spec_of(object);
    auto* const local = local_of(object);
    if (spec == nullptr || local == nullptr || !THPVariable_Check(local)) {
      return FastPathStatus::kArgument;
    }
    const auto id = id_of_spec(spec);
    if (id == 0) {
      return FastPathStatus::kSpec;
    }
    call_.tensors.push_back({place_, index, object});
    return add(kDTensor, id);
  }

  // Reads a plain tensor. Like PyTorch, accepts 0-dim tensors as replicated ones, and others only under
  // implicit_replication().
  FastPathStatus read_plain(const at::Tensor& tensor, int64_t index) {
    const bool is_scalar = tensor.dim() == 0;
    if (!is_scalar && !(at::get_dtensor_allow_implicit_replication() && tensor.layout() == at::kStrided &&
                        !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())) {
      return FastPathStatus::kArgument;
    }
    const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    call_.tensors.push_back({place_, index, nullptr, is_number});
    add(kPlain, static_cast<uint64_t>(tensor.scalar_type()) << 1 | (is_number ? 1 : 0));
    if (is_number && !at::isComplexType(tensor.scalar_type())) {  // x / 0 differs from x / 2
      add_sign(kDouble, number_in(tensor));
    }
    add(kList, tensor.dim());
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      call_.key.words.push_back(tensor.size(dim));
      call_.key.words.push_back(tensor.stride(dim));
    }
    return FastPathStatus::kHandled;
  }

  FastPathStatus read_all(at::ArrayRef<c10::IValue> values) {
    add(kList, values.size());
    int64_t index = 0;
    for (const auto& value : values) {
      if (const auto status = read(value, index++); status != FastPathStatus::kHandled) {
        return status;
      }
    }
    return FastPathStatus::kHandled;
  }

  // Adds what decisions depend on: the type, the sign, and whether the number is NaN or infinite.
  template <typename Number>
  FastPathStatus add_sign(Tag tag, Number number) {
    const auto real = static_cast<double>(number);
    return add(kSign, tag << 4 | (real > 0 ? 1 : 0) | (real < 0 ? 2 : 0) | (std::isnan(real) ? 4 : 0) |
                          (std::isinf(real) ? 8 : 0));
  }

  FastPathStatus add(Tag tag) {
    call_.key.words.push_back(tag);
    return FastPathStatus::kHandled;
  }

  FastPathStatus add(Tag tag, uint64_t word) {
    call_.key.words.push_back(tag);
    call_.key.words.push_back(word);
    return FastPathStatus::kHandled;
  }

  Call& call_;
  size_t place_ = 0;
  bool is_factor_ = false;
};

// Returns the Python object of an argument. A dtype, layout or memory format is a number on the stack.
py::object python_argument(const c10::IValue& value, const c10::Argument& argument) {
  auto type = argument.real_type();
  if (type->kind() == c10::TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType();
  }
  if (value.isInt() && type->kind() == c10::TypeKind::ScalarTypeType) {
    return to_python(value.toScalarType());
  }
  if (value.isInt() && type->kind() == c10::TypeKind::LayoutType) {
    return py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyObject*>(torch::getTHPLayout(value.toLayout())));
  }
  if (value.isInt() && type->kind() == c10::TypeKind::MemoryFormatType) {
    return py::reinterpret_borrow<py::object>(torch::utils::getTHPMemoryFormat(value.toMemoryFormat()));
  }
  return torch::jit::toPyObject(value);
}

bool equals_default(const c10::IValue& value, const c10::Argument& argument) {
  const auto& standard = argument.default_value();
  return standard.has_value() &&
         (value.isNone() ? standard->isNone() : !value.isTensor() && *standard == value);
}

}  // namespace

DescribedOperator describe_operator(const c10::OperatorHandle& op, py::handle dispatcher) {
  static uint64_t count = 0;
  DescribedOperator described{.handle = op, .name = op.operator_name(), .number = ++count};
  described.result_kind = result_kind_of(op);
  described.writes = op.schema().is_mutable();
  described.overload = py::reinterpret_borrow<py::object>(torch::detail::getTorchApiFunction(op));
  const auto& arguments = op.schema().arguments();
  const auto& returns = op.schema().returns();
  const auto static_arguments =
      StaticArguments::find(attribute<"sharding_propagator">(dispatcher), described.overload);
  described.lists_operands = static_arguments && static_arguments->lists_operands;
  described.draws = attribute<"_random_ops">(dispatcher).contains(described.overload);
  for (size_t i = 0; i < arguments.size(); ++i) {
    for (size_t k = 0; k < returns.size(); ++k) {
      if (share_memory(arguments[i].alias_info(), returns[k].alias_info())) {
        described.views.emplace_back(i, k);
      }
    }
    described.is_aliased.push_back(arguments[i].alias_info() != nullptr);
    described.is_factor.push_back(is_factor(arguments[i]) &&
                                  !(static_arguments && static_arguments->contains(i, arguments[i])));
  }
  return described;
}

PyObject* Call::first_dtensor() const {
  const auto* const first =
      std::ranges::find_if(tensors, [](const auto& one) { return one.dtensor != nullptr; });
  return first == tensors.end() ? nullptr : first->dtensor;
}

bool CallKey::is_on(uint64_t mesh_id) const {
  return std::ranges::any_of(words, [&](uint64_t word) { return is_id_on(word, mesh_id); });
}

FastPathStatus read_call(DescribedPtr op, const torch::jit::Stack& stack, Call& call) {
  CallReader reader(call);
  call.key.words.push_back(op->number);
  const auto num_arguments = op->is_factor.size();
  const auto* const arguments = stack.data() + (stack.size() - num_arguments);
  for (size_t i = 0; i < num_arguments; ++i) {
    if (const auto status = reader.read(arguments[i], i, op->is_factor[i]);
        status != FastPathStatus::kHandled) {
      return status;
    }
  }
  call.key.words.push_back(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()));
  call.op = std::move(op);
  return call.first_dtensor() == nullptr ? FastPathStatus::kArgument : FastPathStatus::kHandled;
}

std::pair<py::tuple, py::dict> python_arguments(const c10::OperatorHandle& op,
                                                const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto* const values = stack.data() + (stack.size() - arguments.size());
  py::list by_position;
  py::dict by_name;
  size_t num_given = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].kwarg_only()) {
      if (!equals_default(values[i], arguments[i])) {
        by_name[py::str(arguments[i].name())] = python_argument(values[i], arguments[i]);
      }
      continue;
    }
    by_position.append(python_argument(values[i], arguments[i]));
    num_given = equals_default(values[i], arguments[i]) ? num_given : by_position.size();
  }
  return {py::tuple(by_position[py::slice(0, static_cast<Py_ssize_t>(num_given), 1)]), by_name};
}

}  // namespace funcol::python
