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

at::Tensor run(const BackwardFunction& function, const at::Tensor& gradient) {
  if (!gradient.defined()) {
    return {};
  }
  const py::gil_scoped_acquire gil;
  try {
    const auto result = function.apply(to_python(gradient));
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
  explicit Node(BackwardFunctionPtr function) : function_(std::move(function)) {}

  variable_list apply(variable_list&& gradients) override {
    const BackwardOf backward(module_);
    return {run(*function_, gradients[0])};
  }
  std::string name() const override { return function_->name(); }

  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    for (const uint64_t part : function_->key()) {
      args.collect(part);
    }
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 compiled::SwapSavedVariables& saved) override {
    return compat::call_when_compiled(
        *this, saved, gradients, {}, {}, /*is_traceable=*/true,
        [function = function_](const variable_list& inputs, const std::vector<c10::IValue>& /*packed*/) {
          return variable_list{run(*function, inputs[0])};
        });
  }

 private:
  BackwardFunctionPtr function_;
  Text module_ = current_module();
};

}  // namespace

void record(const at::Tensor& input, const py::object& output, BackwardFunctionPtr function) {
  auto node = compat::make_node<Node>(std::move(function));
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(THPVariable_Unpack(output.ptr()), node);
}

}  // namespace funcol::python
