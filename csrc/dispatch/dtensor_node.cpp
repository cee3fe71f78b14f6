#include "dispatch/dtensor_node.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

#include "comm/call_site.h"
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
    return compat::call_when_compiled(
        *this, saved, gradients, {}, {}, /*is_traceable=*/true,
        [gradient = gradient_](const variable_list& inputs, const std::vector<c10::IValue>& /*packed*/) {
          return variable_list{run(*gradient, inputs[0])};
        });
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
