#include "dtensor/gradients.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <optional>
#include <string>

#include "comm/started.h"
#include "compat/autograd_node.h"
#include "pyobjects/tensors.h"

namespace funcol::python {
namespace {

namespace compiled = torch::dynamo::autograd;
using torch::autograd::variable_list;

at::Tensor run(const Gradient& gradient, const at::Tensor& of) {
  if (!of.defined()) {
    return {};
  }
  const py::gil_scoped_acquire gil;
  try {
    const auto result = gradient.of(to_python(of));
    return THPVariable_Unpack(result.ptr());
  } catch (py::error_already_set& error) {
    error.restore();
    python_error kept;
    kept.persist();
    throw kept;
  }
}

// A node with one input and one output.
class Node final : public torch::autograd::Node {
 public:
  explicit Node(GradientPtr gradient) : gradient_(std::move(gradient)) {}

  variable_list apply(variable_list&& gradients) override {
    const BackwardOf backward(module_);
    return {run(*gradient_, gradients[0])};
  }
  std::string name() const override { return gradient_->name(); }

  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    for (const uint64_t part : gradient_->key()) {
      args.collect(part);
    }
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 compiled::SwapSavedVariables& saved) override {
    const auto& compiler = compiled::getPyCompilerInterface();
    const auto function = compiler->bind_function(
        saved.get_py_compiler(), name(),
        [gradient = gradient_](const variable_list& inputs, const std::vector<c10::IValue>& /*args*/) {
          return variable_list{run(*gradient, inputs[0])};
        },
        {}, /*is_custom_function=*/true, /*is_traceable=*/true);
    return compiler->call_function(
        saved.get_py_compiler(), "apply_functional", function, gradients, {},
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges())));
  }

 private:
  GradientPtr gradient_;
  Text module_ = current_module();
};

}  // namespace

void record(const at::Tensor& input, const py::object& output, GradientPtr gradient) {
  auto node = compat::make_node<Node>(std::move(gradient));
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(THPVariable_Unpack(output.ptr()), node);
}

}  // namespace funcol::python
