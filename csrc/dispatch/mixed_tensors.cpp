#include "dispatch/mixed_tensors.h"

#include <ATen/DTensorState.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "metas/output_metas.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/mesh_table.h"
#include "pyobjects/meshes.h"

namespace funcol::python {
namespace {

constexpr size_t kMostNamed = 3;

// The beginning of all PyTorch messages about mixed tensors. Messages of this file do not match it, so that
// an error keeps naming the innermost operator.
constexpr std::string_view kRefusal = "got mixed torch.Tensor and DTensor, need to";

// The beginning of PyTorch's message about calls whose only DTensor is a keyword argument.
constexpr std::string_view kNoMesh = "Cannot find device mesh from args for op";

bool is_refusal(std::string_view text) {
  return text.find(kRefusal) != std::string_view::npos || text.find(kNoMesh) != std::string_view::npos;
}

// Plain tensors among the arguments of an operator, by name and shape: "`other`, of shape [4, 4]".
struct PlainTensors {
  std::vector<std::string> read;
  std::vector<std::string> written;
};

bool is_dtensor_instance(const at::Tensor& tensor) {
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return PyType_IsSubtype(Py_TYPE(object.ptr()), dtensor_type()) != 0;
}

bool is_plain_tensor(const at::Tensor& tensor) {
  return tensor.defined() && tensor.sym_numel() != 1 && !is_dtensor_instance(tensor);
}

std::string argument_text(const std::string& name, const at::Tensor& tensor) {
  std::ostringstream text;
  text << "`" << name << "`, of shape " << tensor.sym_sizes();
  return text.str();
}

PlainTensors plain_tensors(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  PlainTensors found;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    auto& names = is_written ? found.written : found.read;
    if (arguments[i].isTensor() && is_plain_tensor(arguments[i].toTensor())) {
      names.push_back(argument_text(argument.name(), arguments[i].toTensor()));
    } else if (arguments[i].isList()) {
      const auto elements = arguments[i].toListRef();
      for (size_t k = 0; k < elements.size(); ++k) {
        if (elements[k].isTensor() && is_plain_tensor(elements[k].toTensor())) {
          names.push_back(
              argument_text(argument.name() + "[" + std::to_string(k) + "]", elements[k].toTensor()));
        }
      }
    }
  }
  return found;
}

std::string plain_tensors_text(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kMostNamed; ++i) {
    text += (i == 0 ? "" : ", and ") + names[i];
  }
  if (names.size() > kMostNamed) {
    text += ", and " + std::to_string(names.size() - kMostNamed) + " more";
  }
  return text + (names.size() == 1 ? ", is a plain tensor" : ", are plain tensors");
}

// Raises the error that names the plain tensors. Returns if there are none.
void raise_naming_plain_tensors(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  const auto plain = plain_tensors(op.schema(), arguments);
  const auto& first = plain.written.empty() ? plain.read : plain.written;
  if (first.empty()) {
    return;
  }
  const bool is_one = first.size() == 1;
  const std::string name = py::str(torch::detail::getTorchApiFunction(op));
  TORCH_CHECK(
      false, "funcol: ", name, ": got mixed torch.Tensor and DTensor: ", plain_tensors_text(first),
      plain.written.empty() ? ""
      : is_one              ? ", and the operator writes to it"
                            : ", and the operator writes to them",
      is_one ? ". Make it a DTensor: " : ". Make them DTensors: ",
      plain.written.empty() ? ""
                            : "by torch.zeros_like(param) where the program calls torch.zeros(param.shape), ",
      "by distribute_tensor(tensor, mesh, placements) if every rank has the same values, by "
      "DTensor.from_local(tensor, mesh, placements) if each rank has its shard. Or call the operator under "
      "torch.distributed.tensor.experimental.implicit_replication(), which takes plain tensors for "
      "replicated ones.");
}

// Returns the mesh of the first DTensor; null if there is none.
py::object mesh_of(const torch::jit::Stack& arguments) {
  for (const auto& one : arguments) {
    if (one.isTensor() && one.toTensor().defined() && is_dtensor_instance(one.toTensor())) {
      const auto dtensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(one.toTensor()));
      return attribute<"mesh">(spec_of(dtensor.ptr()));
    }
  }
  return {};
}

// Calls `op` with replicated DTensors instead of plain tensors, and pushes the results onto the stack.
// Returns false if implicit_replication() does not allow it, no argument is a DTensor, or no plain tensor is
// found.
bool call_with_replicated(const c10::OperatorHandle& op, torch::jit::Stack arguments,
                          torch::jit::Stack* stack) {
  const auto mesh = at::get_dtensor_allow_implicit_replication() ? mesh_of(arguments) : py::object();
  bool is_found = false;
  const auto replicated = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || is_dtensor_instance(tensor)) {
      return tensor;
    }
    is_found = true;
    return make_dtensor(tensor, spec_of_plain(tensor, mesh), Geometry(tensor.sizes(), tensor.strides()));
  };
  for (auto& one : arguments) {
    if (mesh && one.isTensor()) {
      one = replicated(one.toTensor());
    } else if (mesh && one.isTensorList()) {
      auto tensors = one.toTensorVector();
      std::ranges::transform(tensors, tensors.begin(), replicated);
      one = tensors;
    }
  }
  if (!is_found) {
    return false;
  }
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  const py::gil_scoped_release no_gil;
  op.callBoxed(stack);
  return true;
}

}  // namespace

py::object spec_of_plain(const at::Tensor& tensor, py::handle mesh) {
  return new_spec(mesh, std::vector<Placement>(known_mesh(mesh).mesh.num_axes()), tensor_meta(tensor));
}

bool are_on_one_mesh(py::handle tensors) {
  const auto list = checked(PySequence_Fast(tensors.ptr(), "tensors"));
  py::object mesh;  // None for plain tensors
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.ptr()); ++i) {
    auto* const tensor = PySequence_Fast_GET_ITEM(list.ptr(), i);
    auto* const spec = Py_TYPE(tensor) == dtensor_type() ? spec_of(tensor) : nullptr;
    if (spec == nullptr && PyType_IsSubtype(Py_TYPE(tensor), dtensor_type()) != 0) {
      return false;
    }
    auto of_tensor = spec != nullptr ? attribute<"mesh">(spec) : py::none();
    const bool is_first = !mesh;
    if (is_first) {
      mesh = std::move(of_tensor);
    } else if (!mesh.is(of_tensor) &&
               (mesh.is_none() || of_tensor.is_none() || value_of_mesh(mesh) != value_of_mesh(of_tensor))) {
      return false;
    }
  }
  return true;
}

void dispatch_naming_plain_tensors(const c10::impl::PyInterpreterVTable& table, const c10::OperatorHandle& op,
                                   torch::jit::Stack* stack) {
  // PyTorch pops the arguments from the stack.
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  std::exception_ptr refusal;
  std::string text;
  try {
    table.dispatch(op, stack);
    return;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
    refusal = std::current_exception();
  } catch (python_error& error) {
    error.persist();
    text = error.what();
    refusal = std::current_exception();
  }
  if (!is_refusal(text)) {
    std::rethrow_exception(refusal);
  }
  const py::gil_scoped_acquire gil;
  if (text.find(kNoMesh) != std::string::npos && call_with_replicated(op, arguments, stack)) {
    return;
  }
  raise_naming_plain_tensors(op, arguments);
  std::rethrow_exception(refusal);
}

}  // namespace funcol::python
