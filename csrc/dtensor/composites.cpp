#include "dtensor/composites.h"

#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "async/layers.h"
#include "compat/autograd_node.h"
#include "dtensor/gradients.h"
#include "dtensor/native_operators.h"
#include "dtensor/operator_calls.h"
#include "dtensor/spec_numbers.h"
#include "dtensor/trace.h"
#include "planner/lru_cache.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Tensors = c10::SmallVector<Tensor, 4>;
using Mask = uint64_t;  // a bit for each tensor argument

constexpr size_t kMostComposites = 4096;

struct Kind {
  const char* name;
  // The gradient of each of the first two operands reads the other one and nothing else, and that of any
  // other operand reads neither.
  bool is_bilinear;
  bool is_attention;  // chooses among kernels by PyTorch's global settings
};

constexpr std::array<Kind, 6> kKinds{{{"linear", true, false},
                                      {"matmul", true, false},
                                      {"bmm", true, false},
                                      {"layer_norm", false, false},
                                      {"rms_norm", false, false},
                                      {"scaled_dot_product_attention", false, true}}};

bool has_bit(Mask mask, size_t i) { return (mask >> i & 1) != 0; }

// Returns the inputs that the gradients in `needed` read, as PyTorch's derivatives save them.
Mask saved_inputs(const Kind& kind, Mask needed) {
  return kind.is_bilinear ? (needed & 1) << 1 | (needed >> 1 & 1) : ~Mask{0};
}

// Returns true if what is saved for gradients of the inputs in `requires_grad` is what PyTorch saves, so that
// writes to other inputs are no errors.
bool is_covered(const Kind& kind, Mask requires_grad) {
  return (requires_grad & (kind.is_bilinear ? 3 : 1)) != 0;
}

// The values of the forward pass that the backward pass reads, beside inputs.
struct Kept {
  ProgramPtr forward;  // computes the result and the values
  std::vector<ValueId> values;
  bool has_result = false;  // some value is on the result's memory
};

// An input that was not saved, to make one like it.
struct InputLayout {
  explicit InputLayout(const Tensor& dtensor)
      : geometry(dtensor.sizes(), dtensor.strides()), dtype(dtensor.scalar_type()) {
    const auto object = to_python(dtensor);
    spec = copy_without_mesh(spec_of(object.ptr()));
    sizes = THPVariable_Unpack(local_of(object.ptr())).sizes().vec();
  }

  Tensor zeros_like(py::handle mesh, at::Device device) const {
    return make_dtensor(at::zeros(sizes, at::TensorOptions(dtype).device(device)), copy_onto(spec, mesh),
                        geometry);
  }

  py::object spec;
  Geometry geometry;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

// A call of a composite operator with certain specs, as it is remembered.
struct Composite {
  const Kind* kind;
  c10::OperatorHandle op;
  uint64_t id;
  uint64_t handlers_version;           // of the dispatcher's handlers at which it was traced
  c10::SmallVector<size_t, 4> places;  // of the tensors among the arguments
  Mask requires_grad;
  Trace trace;
  ValueId result;
  std::vector<InputLayout> inputs;
  std::shared_ptr<const Kept> kept;
  bool is_declined = false;
};
using CompositePtr = std::shared_ptr<Composite>;

struct Tables {
  std::unique_ptr<torch::Library> kernels;
  LruCache<CallKey, CompositePtr> composites{kMostComposites};
  LruCache<CallKey, ProgramPtr> gradients{kMostComposites};
  uint64_t num_ids = 0;
};

Tables& tables() {
  static auto* const tables = new Tables;  // NOLINT: outlives Python
  return *tables;
}

// While it exists, this thread's composites run as PyTorch runs them.
class Decomposing {
 public:
  Decomposing() : before_(std::exchange(is_active, true)) {}
  ~Decomposing() { is_active = before_; }
  Decomposing(const Decomposing&) = delete;
  Decomposing& operator=(const Decomposing&) = delete;

  static thread_local bool is_active;

 private:
  bool before_;
};
thread_local bool Decomposing::is_active = false;

PyObject* dtensor_of(const Tensor& tensor) {
  const auto object = to_python(tensor);  // the tensor keeps its object
  return Py_TYPE(object.ptr()) == dtensor_type() ? object.ptr() : nullptr;
}

const Tensor& local_in(const Tensor& dtensor) { return THPVariable_Unpack(local_of(dtensor_of(dtensor))); }

py::object mesh_of(const Tensor& dtensor) { return attribute<"mesh">(spec_of(dtensor_of(dtensor))); }

Program::Locals run_below_autograd(const Program& program, Program::Locals locals) {
  const WithoutGil no_gil;
  const c10::impl::ExcludeDispatchKeyGuard guard(kBeforePython);
  return program.run(std::move(locals));
}

Tensor wrap(Tensor local, const ServedCall::ResultSpec& result, py::handle mesh) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kBeforePython);
  return make_dtensor(std::move(local), copy_onto(result.spec, mesh), result.geometry);
}

// Computes the gradients that `needed` names by PyTorch's own derivatives, of a forward pass that is run
// again. Undefined inputs are those that the gradients do not depend on. One is defined at least. Records the
// operators if given a trace.
variable_list differentiate(const Composite& composite, std::vector<c10::IValue> arguments, Tensors inputs,
                            const Tensor& gradient, Mask needed, Trace* trace) {
  const bool is_differentiable = at::GradMode::is_enabled();
  variable_list leaves;
  Tensor result;
  std::optional<Recording> recording;
  std::optional<py::gil_scoped_acquire> gil(std::in_place);
  const auto saved = *std::ranges::find_if(inputs, [](const auto& input) { return input.defined(); });
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto& input = inputs[i];
    if (!input.defined()) {
      input = composite.inputs[i].zeros_like(mesh_of(saved), saved.device());
    }
    // Not the input itself, whose hooks are for the gradient that this is part of.
    input = is_differentiable && input.requires_grad() ? at::alias(input) : input.detach();
    if (has_bit(composite.requires_grad, i) && !input.requires_grad()) {
      input.set_requires_grad(true);
    }
    if (has_bit(needed, i)) {
      leaves.push_back(input);
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
  const Decomposing decomposing;
  {
    const at::AutoGradMode with_gradients(true);
    torch::jit::Stack stack(std::move(arguments));
    composite.op.callBoxed(stack);
    result = stack.back().toTensor();
  }
  if (trace != nullptr) {
    const py::gil_scoped_acquire again;
    if (!trace->begins_as(composite.trace) || trace->num_values() != composite.trace.num_values() ||
        trace->value_of(result) != composite.result) {
      trace->fail();
    }
    trace->add_input(gradient);
  }
  const auto found = torch::autograd::grad({result}, leaves, {gradient}, /*retain_graph=*/std::nullopt,
                                           is_differentiable, /*allow_unused=*/true);
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

// The gradients of a composite's inputs.
class CompositeBackward final : public torch::autograd::Node {
 public:
  // `inputs` are the DTensors among the arguments; `arguments` has None in their place.
  CompositeBackward(CompositePtr composite, std::shared_ptr<const Kept> kept,
                    std::vector<c10::IValue> arguments, const Tensors& inputs, Program::Locals values)
      : composite_(std::move(composite)),
        kept_(std::move(kept)),
        arguments_(std::move(arguments)),
        values_(std::move(values)),
        inputs_(inputs.size()) {
    set_next_edges(torch::autograd::collect_next_edges(variable_list(inputs.begin(), inputs.end())));
    const auto saved = saved_inputs(*composite_->kind, composite_->requires_grad);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (has_bit(saved, i)) {
        inputs_[i] = SavedVariable(inputs[i], /*is_output=*/false);
        is_saved_ |= Mask{1} << i;
      }
    }
  }

  // Has in-place writes to the result found, once this is the result's node.
  void save_result(const Tensor& result) { result_ = SavedVariable(result, /*is_output=*/true); }

  std::string name() const override { return std::string("funcol::") + composite_->kind->name; }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    const auto& gradient = gradients[0];
    if (!gradient.defined()) {
      return variable_list(inputs_.size());
    }
    const auto inputs = unpack();
    const auto needed = needed_gradients();
    if (!at::GradMode::is_enabled() && !has_active_layers() && !Decomposing::is_active) {
      const py::gil_scoped_acquire gil;
      if (const auto described = operator_to_serve(composite_->op);
          described != nullptr && described->handlers_version == composite_->handlers_version &&
          !composite_->is_declined) {
        return replay_or_learn(described, inputs, gradient, needed);
      }
    }
    return differentiate(*composite_, arguments_, inputs, gradient, needed, nullptr);
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
    using Pack = compiled::IValuePacker<std::vector<Tensor>>;
    const auto& compiler = compiled::getPyCompilerInterface();
    const auto function = compiler->bind_function(
        saved.get_py_compiler(), name(),
        [composite = composite_, arguments = arguments_, is_saved = is_saved_, needed = needed_gradients()](
            const variable_list& of_result, const std::vector<c10::IValue>& packed) {
          const WithoutGil no_gil;
          const auto defined = Pack::unpack(packed[0]);
          Tensors inputs(composite->places.size());
          for (size_t i = 0, next = 0; i < inputs.size(); ++i) {
            inputs[i] = has_bit(is_saved, i) ? defined[next++] : Tensor();
          }
          return of_result[0].defined()
                     ? differentiate(*composite, arguments, inputs, of_result[0], needed, nullptr)
                     : variable_list(inputs.size());
        },
        {Pack::packed_type()}, /*is_custom_function=*/true, /*is_traceable=*/false);
    auto results = compiler->call_function(
        saved.get_py_compiler(), "apply_functional", function, gradients, {Pack::pack(given)},
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges())));
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (has_bit(is_saved_, i)) {
        saved.after(inputs_[i]);
      }
    }
    return results;
  }

 private:
  // Returns the inputs; those that were not saved are undefined.
  Tensors unpack() {
    Tensors inputs(inputs_.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (has_bit(is_saved_, i)) {
        inputs[i] = inputs_[i].unpack();
      }
    }
    if (kept_->has_result) {
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

  variable_list replay_or_learn(const std::shared_ptr<DescribedOperator>& described, const Tensors& inputs,
                                const Tensor& gradient, Mask needed) {
    auto* const object = dtensor_of(gradient);
    const auto number = object == nullptr ? 0 : number_of_spec(spec_of(object));
    if (number == 0) {
      const WithoutGil no_gil;
      return differentiate(*composite_, arguments_, inputs, gradient, needed, nullptr);
    }
    CallKey key{described, {composite_->id, needed, number}};
    const auto* const known = tables().gradients.get(key);
    if (known != nullptr) {
      const auto program = *known;
      if (auto gradients = replay(*program, inputs, gradient)) {
        return *std::move(gradients);
      }
      const WithoutGil no_gil;
      return differentiate(*composite_, arguments_, inputs, gradient, needed, nullptr);
    }
    Trace trace;
    variable_list gradients;
    {
      const WithoutGil no_gil;
      gradients = differentiate(*composite_, arguments_, inputs, gradient, needed, &trace);
    }
    if (const auto program = learn(trace, gradients)) {
      tables().gradients.put(std::move(key), program);
    } else {
      composite_->is_declined = true;
    }
    return gradients;
  }

  // Returns nothing where the forward pass has kept other values than the program reads, or tensors that
  // have to move have other sizes.
  std::optional<variable_list> replay(const Program& program, const Tensors& inputs, const Tensor& gradient) {
    Program::Locals locals(program.num_values());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined()) {
        locals[i] = local_in(inputs[i]);
      }
    }
    for (size_t i = 0; i < values_.size(); ++i) {
      locals[kept_->values[i]] = values_[i];
    }
    locals[composite_->trace.num_values()] = local_in(gradient);
    if (!std::ranges::all_of(program.inputs(), [&](ValueId value) { return locals[value].defined(); }) ||
        !program.takes(locals)) {
      return std::nullopt;
    }
    const auto mesh = mesh_of(gradient);
    auto found = run_below_autograd(program, std::move(locals));
    variable_list gradients(found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i].defined()) {
        gradients[i] = wrap(std::move(found[i]), *program.output_spec(i), mesh);
      }
    }
    return gradients;
  }

  // Returns the program of the gradients, and has later forward passes keep what it reads; null if there is
  // none.
  ProgramPtr learn(Trace& trace, const variable_list& gradients) const {
    if (trace.has_failed()) {
      return nullptr;
    }
    std::vector<ValueId> outputs;
    for (const auto& gradient : gradients) {
      outputs.push_back(gradient.defined() ? trace.value_of(gradient) : kNoValue);
      if (gradient.defined() && (outputs.back() == kNoValue || shares_memory_with_inputs(trace, gradient))) {
        return nullptr;
      }
    }
    const auto& forward = composite_->trace;
    const auto program = trace.program(outputs, forward.num_steps());
    if (program == nullptr) {
      return nullptr;
    }
    auto kept = std::make_shared<Kept>(*composite_->kept);
    for (const auto value : program->inputs()) {
      if (value < inputs_.size() && !has_bit(is_saved_, value)) {
        return nullptr;
      }
      if (value >= inputs_.size() && value < forward.num_values() &&
          std::ranges::find(kept->values, value) == kept->values.end()) {
        kept->values.push_back(value);
        kept->has_result |= trace.share_memory(value, composite_->result);
      }
    }
    outputs = kept->values;
    outputs.insert(outputs.begin(), composite_->result);
    kept->forward = forward.program(outputs);
    if (kept->forward == nullptr) {
      return nullptr;
    }
    composite_->kept = std::move(kept);
    return program;
  }

  // Gradients on the memory of another tensor are views, which autograd knows as such.
  bool shares_memory_with_inputs(const Trace& trace, const Tensor& gradient) const {
    const auto of_gradient = trace.value_of(gradient);
    for (ValueId value = 0; value <= composite_->trace.num_values(); ++value) {
      if (trace.share_memory(value, of_gradient)) {
        return true;
      }
    }
    return false;
  }

  CompositePtr composite_;
  std::shared_ptr<const Kept> kept_;
  std::vector<c10::IValue> arguments_;
  Program::Locals values_;  // local tensors, as kept_ lists them
  std::vector<SavedVariable> inputs_;
  Mask is_saved_ = 0;
  SavedVariable result_;
};

// Returns true if nothing unusual is active on this thread.
bool is_usual(c10::DispatchKeySet keys) {
  return !Decomposing::is_active && !has_active_layers() && !c10::InferenceMode::is_enabled() &&
         !keys.has_any(c10::autocast_dispatch_keyset) &&
         !c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset) &&
         at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

void run_as_pytorch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::impl::MaybeSetTLSOnEntryGuard guard;
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::PythonTLSSnapshot),
      stack);
}

// Adds the global settings by which attention chooses its kernel.
void add_settings(CallKey& key) {
  const auto& context = at::globalContext();
  uint64_t word = 0;
  for (const bool flag :
       {context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP(),
        context.userEnabledCuDNNSDP(), context.deterministicAlgorithms()}) {
    word = word << 1 | (flag ? 1 : 0);
  }
  key.words.push_back(word);
}

// Runs the call as PyTorch does, and remembers it.
void learn(const Kind& kind, const c10::OperatorHandle& op, c10::DispatchKeySet keys, const Call& call,
           Mask requires_grad, torch::jit::Stack& stack) {
  auto composite = destroyed_with_gil(
      std::make_unique<Composite>(Composite{.kind = &kind,
                                            .op = op,
                                            .id = ++tables().num_ids,
                                            .handlers_version = call.key.op->handlers_version,
                                            .requires_grad = requires_grad}));
  const auto* const arguments = stack.data() + (stack.size() - op.schema().arguments().size());
  for (const auto& one : call.tensors) {
    composite->places.push_back(one.place);
    composite->inputs.emplace_back(arguments[one.place].toTensor());
    composite->trace.add_input(arguments[one.place].toTensor());
  }
  {
    const Recording recording(composite->trace);
    const WithoutGil no_gil;
    const Decomposing decomposing;
    run_as_pytorch(op, keys, &stack);
  }
  auto& trace = composite->trace;
  composite->result = trace.has_failed() ? kNoValue : trace.value_of(stack.back().toTensor());
  composite->is_declined = true;
  if (composite->result != kNoValue && composite->result >= composite->places.size()) {
    auto kept = std::make_shared<Kept>();
    kept->forward = trace.program({composite->result});
    bool is_view = false;
    for (ValueId input = 0; input < composite->places.size(); ++input) {
      is_view |= trace.share_memory(input, composite->result);
    }
    composite->is_declined = kept->forward == nullptr || kept->forward->moves_tensors() || is_view;
    composite->kept = std::move(kept);
  }
  trace.release_tensors();
  tables().composites.put(call.key, std::move(composite));
}

void replay(const CompositePtr& composite, const Call& call, torch::jit::Stack& stack) {
  const auto num_arguments = composite->op.schema().arguments().size();
  auto* const arguments = stack.data() + (stack.size() - num_arguments);
  const auto kept = composite->kept;
  Tensors inputs;
  Program::Locals locals(kept->forward->num_values());
  for (const auto& one : call.tensors) {
    locals[inputs.size()] = THPVariable_Unpack(local_of(one.dtensor));
    inputs.push_back(std::move(arguments[one.place]).toTensor());
    arguments[one.place] = {};
  }
  const auto mesh = attribute<"mesh">(spec_of(call.tensors[0].dtensor));
  auto outputs = run_below_autograd(*kept->forward, std::move(locals));
  auto result = wrap(std::move(outputs[0]), *kept->forward->output_spec(0), mesh);
  if (composite->requires_grad != 0) {
    std::vector<c10::IValue> others(arguments, arguments + num_arguments);
    auto node =
        compat::make_node<CompositeBackward>(composite, kept, std::move(others), inputs,
                                             Program::Locals(std::make_move_iterator(outputs.begin() + 1),
                                                             std::make_move_iterator(outputs.end())));
    torch::autograd::set_history(result, node);
    if (kept->has_result) {
      node->save_result(result);
    }
  }
  torch::jit::drop(stack, num_arguments);
  torch::jit::push(stack, std::move(result));
}

// Returns false if PyTorch has to run the call: nothing is done then.
bool serve(const Kind& kind, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
           torch::jit::Stack& stack) {
  const py::gil_scoped_acquire gil;
  const auto described = operator_to_serve(op);
  Call call;
  if (described == nullptr ||
      read_call(described, stack, op.schema().arguments().size(), call) != Fate::kServed) {
    return false;
  }
  const auto* const arguments = stack.data() + (stack.size() - op.schema().arguments().size());
  Mask requires_grad = 0;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& one = call.tensors[i];
    if (one.dtensor == nullptr || one.index >= 0) {
      return false;
    }
    const auto& tensor = arguments[one.place].toTensor();
    if (tensor._fw_grad(0).defined()) {
      return false;
    }
    requires_grad |= static_cast<Mask>(at::GradMode::is_enabled() && tensor.requires_grad() ? 1 : 0) << i;
  }
  if (requires_grad != 0 && !is_covered(kind, requires_grad)) {
    return false;
  }
  call.key.words.push_back(requires_grad);
  if (kind.is_attention) {
    add_settings(call.key);
  }
  const auto* const known = tables().composites.get(call.key);
  if (known == nullptr || (*known)->handlers_version != described->handlers_version) {
    learn(kind, op, keys, call, requires_grad, stack);
    return true;
  }
  const auto composite = *known;
  if (composite->is_declined) {
    return false;
  }
  replay(composite, call, stack);
  ++described->counts[static_cast<size_t>(Fate::kServed)];
  return true;
}

template <size_t number>
void call_composite(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (!is_usual(keys) || !serve(kKinds[number], op, keys, *stack)) {
    run_as_pytorch(op, keys, stack);
  }
}

template <size_t... numbers>
void register_kernels(torch::Library& library, std::index_sequence<numbers...> /*kinds*/) {
  (library.impl(kKinds[numbers].name, torch::CppFunction::makeFromBoxedFunction<&call_composite<numbers>>()),
   ...);
}

}  // namespace

void put_composites() {
  if (tables().kernels == nullptr) {
    tables().kernels = std::make_unique<torch::Library>(
        torch::Library::IMPL, "aten", c10::DispatchKey::PythonTLSSnapshot, __FILE__, __LINE__);
    register_kernels(*tables().kernels, std::make_index_sequence<kKinds.size()>());
  }
}

void take_composites() { tables().kernels.reset(); }

void forget_composites() {
  tables().composites.clear();
  tables().gradients.clear();
}

size_t num_composites() { return tables().composites.size() + tables().gradients.size(); }

}  // namespace funcol::python
