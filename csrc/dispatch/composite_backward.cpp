#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/nll_loss_nd.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>

#include "async/dispatch_modes.h"
#include "compat/autograd_node.h"
#include "dispatch/call_key.h"
#include "dispatch/composite_call.h"
#include "dispatch/dtensor_node.h"
#include "dispatch/fast_dispatch.h"
#include "layout/cache.h"
#include "pyobjects/attributes.h"
#include "pyobjects/specs.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {

thread_local bool DecomposeGuard::is_active = false;

InputLayout::InputLayout(const at::Tensor& dtensor)
    : spec(shared_spec(spec_of(dtensor_object(dtensor)))),
      sizes(local_of(dtensor).sizes().vec()),
      dtype(dtensor.scalar_type()) {}

at::Tensor InputLayout::zeros_like(py::handle mesh, at::Device device) const {
  return make_dtensor(at::zeros({}, at::TensorOptions(dtype).device(device)).expand(sizes), spec->on(mesh),
                      spec->geometry);
}

namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Returns the programs of gradients, by composite, mask of the gradients and spec of the result's gradient.
Cache<CallKey, LocalProgramPtr>& programs() {
  static auto* const programs =
      new Cache<CallKey, LocalProgramPtr>(find_table("composite_gradients"));  // NOLINT: outlives Python
  return *programs;
}

py::object mesh_of_dtensor(const Tensor& dtensor) {
  return attribute<"mesh">(spec_of(dtensor_object(dtensor)));
}

// Stands for the logits of a loss, which are not saved. Empty for other operators.
struct SavedLogits {
  Tensor log_probs;
  torch::autograd::Edge edge;  // of the logits; invalid if gradients of gradients are not needed
};

// Runs a cross_entropy_loss from the result of its log_softmax on. Only the node of the logits among
// `arguments` is read. Records the operators, log_softmax as well, if given a trace.
Tensor run_nll_loss(const Composite& composite, const std::vector<c10::IValue>& arguments,
                    const Tensor& log_probs, Trace* trace) {
  const auto& logits = arguments[0].toTensor();
  auto node = compat::make_node<torch::autograd::generated::LogSoftmaxBackward0>();
  node->set_next_edges(torch::autograd::collect_next_edges(logits));
  node->dim = logits.dim() == 1 ? 0 : 1;
  node->self_scalar_type = logits.scalar_type();
  torch::autograd::set_history(log_probs, node);
  if (trace != nullptr) {
    const py::gil_scoped_acquire gil;
    trace->repeat_first_step(composite.trace, log_probs);
  }
  node->result_ = SavedVariable(log_probs, /*is_output=*/true);
  return at::nll_loss_nd_symint(log_probs, arguments[1].toTensor(), arguments[2].toOptional<Tensor>(),
                                arguments[3].toInt(), arguments[4].toSymInt());
}

// Computes the gradients in `needed` with PyTorch's own derivatives, after running the forward pass again, or
// that of a loss from its log-probabilities on. The gradients do not depend on undefined inputs; at least one
// input is defined. Records the operators if given a trace.
variable_list differentiate(const Composite& composite, std::vector<c10::IValue> arguments,
                            CompositeInputs inputs, const SavedLogits& logits, const Tensor& gradient,
                            Mask needed, Trace* trace) {
  const bool is_differentiable = at::GradMode::is_enabled();
  torch::autograd::edge_list leaves;
  torch::autograd::Edge root;
  std::optional<Recording> recording;
  std::optional<py::gil_scoped_acquire> gil(std::in_place);
  const auto saved = *std::ranges::find_if(inputs, [](const auto& input) { return input.defined(); });
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto& input = inputs[i];
    if (!input.defined()) {
      input = composite.inputs[i].zeros_like(mesh_of_dtensor(saved), saved.device());
      if (is_differentiable && i == 0 && logits.edge.is_valid()) {
        auto node = compat::make_node<torch::autograd::Identity>();
        node->set_next_edges({logits.edge});
        torch::autograd::set_history(input, node);
      }
    }
    // Not the input itself: its hooks are for the full gradient, of which this is a part.
    input = is_differentiable && input.requires_grad() ? at::alias(input) : input.detach();
    if (has_bit(composite.requires_grad, i) && !input.requires_grad()) {
      input.set_requires_grad(true);
    }
    if (has_bit(needed, i)) {
      leaves.push_back(torch::autograd::impl::gradient_edge(input));
    }
    if (trace != nullptr) {
      trace->add_input(input);
    }
    arguments[composite.places[i]] = input;
  }
  if (trace != nullptr) {
    recording.emplace(*trace);
  }
  gil.reset();
  const DecomposeGuard decomposing;
  {
    const at::AutoGradMode with_gradients(true);
    torch::jit::Stack stack(std::move(arguments));
    if (logits.log_probs.defined()) {
      stack.emplace_back(run_nll_loss(composite, stack, logits.log_probs, trace));
    } else {
      composite.op.callBoxed(stack);
    }
    // Only the result's node is needed: keeping its memory would add to that of the gradients.
    const auto& result = stack.back().toTensor();
    root = torch::autograd::impl::gradient_edge(result);
    if (trace != nullptr) {
      const py::gil_scoped_acquire again;
      if (!trace->starts_with(composite.trace) || trace->num_values() != composite.trace.num_values() ||
          trace->value_of(result) != composite.result) {
        trace->fail();
      }
      trace->add_input(gradient);
    }
  }
  const auto found = torch::autograd::Engine::get_default_engine().execute(
      {root}, {gradient}, /*keep_graph=*/is_differentiable, /*create_graph=*/is_differentiable,
      /*accumulate_grad=*/false, leaves);
  variable_list gradients(inputs.size());
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (has_bit(needed, i)) {
      gradients[i] = found[next++];
    }
  }
  return gradients;
}

namespace compiled = torch::dynamo::autograd;

// The autograd node that computes the gradients of a composite's inputs.
class CompositeBackward final : public torch::autograd::Node {
 public:
  // Saves inputs. `inputs` are the DTensors among the arguments; `arguments` has None in their place.
  CompositeBackward(CompositePtr composite, std::shared_ptr<const SavedValues> saved_values,
                    std::vector<c10::IValue> arguments, const CompositeInputs& inputs,
                    LocalProgram::Locals values)
      : composite_(std::move(composite)),
        saved_values_(std::move(saved_values)),
        arguments_(std::move(arguments)),
        values_(std::move(values)),
        inputs_(inputs.size()) {
    set_next_edges(torch::autograd::collect_next_edges(variable_list(inputs.begin(), inputs.end())));
    const auto saved = composite_->kind->saved_inputs(composite_->requires_grad);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (has_bit(saved, i)) {
        inputs_[i] = SavedVariable(inputs[i], /*is_output=*/false);
        is_saved_ |= Mask{1} << i;
      }
    }
  }

  // Saves the result, so that in-place writes to it are found. Requires that this is the result's node.
  void save_result(const Tensor& result) { result_ = SavedVariable(result, /*is_output=*/true); }

  std::string name() const override { return std::string("funcol::") + composite_->kind->name; }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    const auto& gradient = gradients[0];
    if (!gradient.defined()) {
      return variable_list(inputs_.size());
    }
    const auto inputs = unpack_inputs();
    const auto needed = needed_gradients();
    std::shared_ptr<Trace> trace;  // of the first pass, for later ones
    CallWords key;
    if (!at::GradMode::is_enabled() && !has_active_layers() && !DecomposeGuard::is_active) {
      const py::gil_scoped_acquire gil;
      if (const auto id = spec_id_for_fast_path(gradient); id != 0) {
        key.words = {composite_->id, needed, id};
        const auto* const known = programs().find(key);
        if (known == nullptr && programs().admits()) {
          trace = destroyed_with_gil(std::make_unique<Trace>());
        } else if (auto found =
                       known == nullptr ? std::nullopt : replay(LocalProgramPtr(*known), inputs, gradient)) {
          return *std::move(found);
        }
      }
    }
    SavedLogits logits;
    if (composite_->kind->is_loss) {
      logits = {wrap_log_probs(*saved_values_, values_[0], inputs), next_edge(0)};
    }
    auto found = differentiate(*composite_, arguments_, inputs, logits, gradient, needed, trace.get());
    if (trace != nullptr) {
      const py::gil_scoped_acquire gil;
      if (auto program = make_program(*trace, found)) {
        programs().insert(key, std::move(program));
      } else {
        composite_->falls_back = true;
        composite_->handled = trace->handled();
        composite_->trace = {};
        composite_->saved_values = nullptr;
      }
    }
    return found;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto& input : inputs_) {
      input.reset_data();
    }
    result_.reset_data();
    values_.clear();
  }

  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    args.collect(composite_->id);
    args.collect(is_saved_);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (has_bit(is_saved_, i)) {
        args.collect(inputs_[i], /*is_output=*/false);
      }
    }
    if (composite_->kind->is_loss) {
      args.collect(values_[0]);
    }
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 compiled::SwapSavedVariables& saved) override {
    std::vector<Tensor> given;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (has_bit(is_saved_, i)) {
        saved.before(inputs_[i]);
        given.push_back(inputs_[i].unpack());
      }
    }
    if (composite_->kind->is_loss) {
      saved.before(values_[0]);
      given.push_back(values_[0]);
    }
    using Pack = compiled::IValuePacker<std::vector<Tensor>>;
    auto results = compat::call_when_compiled(
        *this, saved, gradients, {Pack::pack(given)}, {Pack::packed_type()}, /*is_traceable=*/false,
        [composite = composite_, saved_values = saved_values_, arguments = arguments_, is_saved = is_saved_,
         needed = needed_gradients()](const variable_list& of_result,
                                      const std::vector<c10::IValue>& packed) {
          const WithoutGil no_gil;
          const auto defined = Pack::unpack(packed[0]);
          CompositeInputs inputs(composite->places.size());
          for (size_t i = 0, next = 0; i < inputs.size(); ++i) {
            inputs[i] = has_bit(is_saved, i) ? defined[next++] : Tensor();
          }
          SavedLogits logits;
          if (composite->kind->is_loss) {
            logits.log_probs = wrap_log_probs(*saved_values, defined.back(), inputs);
          }
          return of_result[0].defined()
                     ? differentiate(*composite, arguments, inputs, logits, of_result[0], needed, nullptr)
                     : variable_list(inputs.size());
        });
    if (composite_->kind->is_loss) {
      saved.after(values_[0]);
    }
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (has_bit(is_saved_, i)) {
        saved.after(inputs_[i]);
      }
    }
    return results;
  }

 private:
  // Returns the DTensor of the log-probabilities of a loss, whose targets `inputs` has.
  static Tensor wrap_log_probs(const SavedValues& saved_values, const Tensor& local,
                               const CompositeInputs& inputs) {
    const py::gil_scoped_acquire gil;
    return saved_values.forward->wrap(1, local, mesh_of_dtensor(inputs[1]));
  }

  // Returns the inputs; those that were not saved are undefined.
  CompositeInputs unpack_inputs() {
    CompositeInputs inputs(inputs_.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (has_bit(is_saved_, i)) {
        inputs[i] = inputs_[i].unpack();
      }
    }
    if (saved_values_->has_result) {
      result_.unpack(getptr());
    }
    return inputs;
  }

  Mask needed_gradients() const {
    Mask needed = 0;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      needed |= static_cast<Mask>(task_should_compute_output(i) ? 1 : 0) << i;
    }
    return needed;
  }

  // Returns the id of the gradient's spec; 0 if PyTorch has to run the pass.
  uint64_t spec_id_for_fast_path(const Tensor& gradient) const {
    auto* const object = dtensor_object(gradient);
    return object != nullptr && !composite_->falls_back && supported_operator(composite_->op) != nullptr
               ? id_of_spec(spec_of(object))
               : 0;
  }

  // Runs `program` on local tensors. Returns nullopt if the forward pass has not saved a value that the
  // program reads, or if LocalProgram::can_run() returns false.
  std::optional<variable_list> replay(const LocalProgramPtr& program, const CompositeInputs& inputs,
                                      const Tensor& gradient) const {
    LocalProgram::Locals locals(program->num_values());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined()) {
        locals[i] = local_of(inputs[i]);
      }
    }
    for (size_t i = 0; i < values_.size(); ++i) {
      locals[saved_values_->values[i]] = values_[i];
    }
    locals[composite_->trace.num_values()] = local_of(gradient);
    if (!std::ranges::all_of(program->inputs(), [&](ValueId value) { return locals[value].defined(); }) ||
        !program->can_run(locals)) {
      return std::nullopt;
    }
    const auto mesh = mesh_of_dtensor(gradient);
    auto found = program->run(std::move(locals));
    variable_list gradients(found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i].defined()) {
        gradients[i] = program->wrap(i, std::move(found[i]), mesh);
      }
    }
    return gradients;
  }

  // Returns the program of the gradients, or null if there is none. Makes later forward passes keep the
  // values that it reads.
  LocalProgramPtr make_program(const Trace& trace, const variable_list& gradients) const {
    if (trace.has_failed() || composite_->falls_back) {
      return nullptr;
    }
    const auto& forward = composite_->trace;
    std::vector<ValueId> outputs;
    for (const auto& gradient : gradients) {
      outputs.push_back(gradient.defined() ? trace.value_of(gradient) : kNoValue);
      // Gradients that share memory with other tensors are views, and autograd tracks views.
      if (gradient.defined() &&
          (outputs.back() == kNoValue || trace.is_view(outputs.back(), forward.num_values() + 1))) {
        return nullptr;
      }
    }
    const auto program = trace.program(outputs, forward.num_steps());
    if (program == nullptr) {
      return nullptr;
    }
    auto saved_values = std::make_shared<SavedValues>(*composite_->saved_values);
    for (const auto value : program->inputs()) {
      if (value < inputs_.size() && !has_bit(is_saved_, value)) {
        return nullptr;
      }
      if (value >= inputs_.size() && value < forward.num_values() &&
          std::ranges::find(saved_values->values, value) == saved_values->values.end()) {
        saved_values->values.push_back(value);
        saved_values->has_result |= trace.share_memory(value, composite_->result);
      }
    }
    outputs = saved_values->values;
    outputs.insert(outputs.begin(), composite_->result);
    saved_values->forward = forward.program(outputs);
    if (saved_values->forward == nullptr) {
      return nullptr;
    }
    composite_->saved_values = std::move(saved_values);
    return program;
  }

  CompositePtr composite_;
  std::shared_ptr<const SavedValues> saved_values_;
  std::vector<c10::IValue> arguments_;
  LocalProgram::Locals values_;  // local tensors, as saved_values_ lists them
  std::vector<SavedVariable> inputs_;
  Mask is_saved_ = 0;
  SavedVariable result_;
};

}  // namespace

void record_backward(const CompositePtr& composite, std::shared_ptr<const SavedValues> saved_values,
                     std::vector<c10::IValue> arguments, const CompositeInputs& inputs,
                     LocalProgram::Locals values, const at::Tensor& result) {
  const bool has_result = saved_values->has_result;
  auto node = compat::make_node<CompositeBackward>(composite, std::move(saved_values), std::move(arguments),
                                                   inputs, std::move(values));
  torch::autograd::set_history(result, node);
  if (has_result) {
    node->save_result(result);
  }
}

}  // namespace funcol::python
