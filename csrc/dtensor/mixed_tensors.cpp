#include "dtensor/mixed_tensors.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "pyobjects/dtensors.h"

namespace funcol::python {
namespace {

constexpr size_t kMostNamed = 3;

// Begins every text of PyTorch's about mixed tensors. Texts of this file go on otherwise: an operator that
// runs within another one is the one to name.
constexpr std::string_view kRefusal = "got mixed torch.Tensor and DTensor, need to";

bool is_refusal(std::string_view text) { return text.find(kRefusal) != std::string_view::npos; }

// Plain tensors among the arguments of an operator, by name and shape: "`other`, of shape [4, 4]".
struct PlainTensors {
  std::vector<std::string> read;
  std::vector<std::string> written;
};

bool is_plain(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.sym_numel() == 1) {
    return false;
  }
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return PyType_IsSubtype(Py_TYPE(object.ptr()), dtensor_type()) == 0;
}

std::string described(const std::string& name, const at::Tensor& tensor) {
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
    if (arguments[i].isTensor() && is_plain(arguments[i].toTensor())) {
      names.push_back(described(argument.name(), arguments[i].toTensor()));
    } else if (arguments[i].isList()) {
      const auto elements = arguments[i].toListRef();
      for (size_t k = 0; k < elements.size(); ++k) {
        if (elements[k].isTensor() && is_plain(elements[k].toTensor())) {
          names.push_back(described(argument.name() + "[" + std::to_string(k) + "]", elements[k].toTensor()));
        }
      }
    }
  }
  return found;
}

std::string named(const std::vector<std::string>& names) {
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
void raise_naming(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  const auto plain = plain_tensors(op.schema(), arguments);
  const auto& first = plain.written.empty() ? plain.read : plain.written;
  if (first.empty()) {
    return;
  }
  const bool is_one = first.size() == 1;
  const std::string name = py::str(torch::detail::getTorchApiFunction(op));
  TORCH_CHECK(
      false, "funcol: ", name, ": got mixed torch.Tensor and DTensor: ", named(first),
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

}  // namespace

void dispatch_naming_plain_tensors(const c10::impl::PyInterpreterVTable& table, const c10::OperatorHandle& op,
                                   torch::jit::Stack* stack) {
  // PyTorch takes the arguments off the stack.
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  std::exception_ptr refusal;
  try {
    table.dispatch(op, stack);
    return;
  } catch (const c10::Error& error) {
    if (!is_refusal(error.what_without_backtrace())) {
      throw;
    }
    refusal = std::current_exception();
  } catch (python_error& error) {
    error.persist();
    if (!is_refusal(error.what())) {
      throw;
    }
    refusal = std::current_exception();
  }
  const py::gil_scoped_acquire gil;
  raise_naming(op, arguments);
  std::rethrow_exception(refusal);
}

}  // namespace funcol::python
