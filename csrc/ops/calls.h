// The out-of-place collectives as C++ functions, called through PyTorch's dispatcher:
//
//   at::Tensor sum = call::all_reduce(x, "sum", group);
//
// Arguments are those of the schema: a group is a name or a ProcessGroup, a reduce op a name or a ReduceOp,
// split_sizes one size per rank or nullopt for equal shares.
//
// Each is a Collective, made in the file of its collective from one description of all its forms:
//
//   const decltype(call::broadcast) call::broadcast(
//       {.name = "broadcast"}, start_broadcast, {.rule = rule, .is_in_core = true});
//
// makes funcol::broadcast with kernels for all dispatch keys, and the function call::broadcast for C++. Forms
// have the C++ signature that the dispatcher gives to the schema: a group or reduce op is an IValue.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymIntArrayRef.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "async/dispatch_modes.h"
#include "ops/backend_tensor.h"
#include "ops/core_call.h"
#include "ops/gradient.h"
#include "ops/meta.h"
#include "ops/operator.h"

namespace funcol {

// A collective that does not modify its input tensors.
template <typename Signature>
class Collective;

// A collective of this signature: `Inputs` is one tensor or a TensorList, `Result` one or a vector of them.
template <typename Result, typename Inputs, typename... Rest>
class Collective<Result(Inputs, Rest...)> {
 public:
  using Form = Result (*)(Inputs, Rest...);

  struct Forms {
    // The results without data: sizes, which may be symbols, dtypes, strides. Null: those of the inputs,
    // contiguous.
    Form meta = nullptr;
    // The collective made of PyTorch's _c10d_functional operators, wait_tensor and ATen's, for layers to see.
    // It sends the bytes that `start` sends, in the same order: a layer may watch on some ranks of a group
    // and not on others. Null: the _c10d_functional operator of this name, with the same arguments.
    Form traced = nullptr;
    // Makes the gradients of the inputs, from the data of `saved` among others.
    autograd::Rule rule = nullptr;
    // Returns what the rule needs, from checked arguments. Null: the arguments after the inputs, split sizes
    // as saved_sizes().
    autograd::Data (*saved)(Inputs, Rest...) = nullptr;
    // The first of these data is a reduce op, which says whether the rule needs inputs and results, too.
    bool saves_reduce_op = false;
    // Records a special case of another collective by that one's recorded(). Null: `rule` is attached.
    Form recorded = nullptr;
    // Raises unless one backend can take all of the inputs. Null where there is one input. Called before the
    // dispatcher picks a device.
    void (*check)(at::TensorList inputs, const char* op) = nullptr;
    // True if PyTorch's _c10d_functional has an operator of this name.
    bool is_in_core = false;
  };

  // Defines the operator. `start` has the parameters of the schema, with ReduceOps, groups and numbers
  // instead of IValues and symbols: see start_argument().
  template <typename... Native>
  Collective(const OperatorInfo& info, StartedCollective (*start)(Native...), const Forms& forms)
      : operator_(info), forms_(forms), handle_(define(start)) {}

  // Calls the operator through the dispatcher: for tensors of any kind (eager, meta, fake, functional, a
  // subclass), under any layer, with or without a gradient.
  Result operator()(Inputs inputs, Rest... rest) const {
    return is_watched_below_autograd(inputs) ? traced(inputs, rest...) : handle_.call(inputs, rest...);
  }

  Result traced(Inputs inputs, Rest... rest) const {
    if (forms_.traced != nullptr) {
      return forms_.traced(inputs, rest...);
    }
    return core::call_and_wait(operator_.op(), {inputs, rest...}).template to<Result>();
  }

  // Runs the collective with nothing recorded: the traced form if a layer watches, so that it sees operators
  // that it knows; else the kernel of the device.
  Result unrecorded(Inputs inputs, Rest... rest) const {
    if (is_watched(inputs)) {
      const at::AutoGradMode no_grad(false);
      return traced(inputs, rest...);
    }
    const BelowAutograd below_autograd;
    return handle_.call(inputs, rest...);
  }

  // Runs the collective and records it; an input needs a gradient.
  Result recorded(Inputs inputs, Rest... rest) const {
    if (forms_.recorded != nullptr) {
      return forms_.recorded(inputs, rest...);
    }
    auto outputs = unrecorded(inputs, rest...);
    auto data =
        forms_.saved != nullptr ? forms_.saved(inputs, rest...) : autograd::Data{autograd::saved(rest)...};
    const bool saves_values =
        forms_.saves_reduce_op && autograd::depends_on_values(reduce_op_from_ivalue(data[0], operator_.op()));
    return autograd::record(inputs, std::move(outputs), operator_.op(), forms_.rule, std::move(data),
                            saves_values);
  }

  // Returns the data of a rule: the arguments after the input, and the input's sizes.
  static autograd::Data arguments_and_sizes(Inputs input, Rest... rest) {
    return {autograd::saved(rest)..., input.sym_sizes()};
  }

  autograd::Rule rule() const { return forms_.rule; }

 private:
  using Handle = c10::TypedOperatorHandle<Result(Inputs, Rest...)>;

  static bool is_watched(at::TensorList inputs) {
    return has_active_layers() || std::ranges::any_of(inputs, belongs_to_layer);
  }

  // Returns true if a layer below autograd is active, as in DTensor's dispatcher while a compiler traces: the
  // layer would meet funcol's own operator, which it does not know.
  static bool is_watched_below_autograd(at::TensorList inputs) {
    const auto& excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
    return excluded.has(c10::DispatchKey::AutogradFunctionality) && !excluded.has(c10::DispatchKey::Python) &&
           is_watched(inputs);
  }

  Result above_devices(Inputs inputs, Rest... rest) const {
    if (forms_.check != nullptr) {
      forms_.check(inputs, operator_.op());
    }
    check_no_tangents(inputs, operator_.op());
    // functorch's transforms do not accept autograd nodes written in C++, but know PyTorch's operators.
    if (has_active_transforms()) {
      return traced(inputs, rest...);
    }
    return autograd::needs_gradient(inputs) ? recorded(inputs, rest...) : unrecorded(inputs, rest...);
  }

  Result meta(Inputs inputs, Rest... rest) const {
    if (forms_.meta != nullptr) {
      return forms_.meta(inputs, rest...);
    }
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      return meta_like(inputs);
    } else {
      return meta_of_each(inputs, meta_like);
    }
  }

  static Result pending(StartedCollective start) {
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      return as_sole_pending(std::move(start));
    } else {
      return as_pending(std::move(start));
    }
  }

  template <Result (Collective::*run)(Inputs, Rest...) const>
  torch::CppFunction kernel() {
    return torch::CppFunction(
        [this](Inputs inputs, Rest... rest) -> Result { return (this->*run)(inputs, rest...); });
  }

  template <typename... Native>
  Handle define(StartedCollective (*start)(Native...)) {
    using Key = c10::DispatchKey;
    operator_.set_device_kernel([&] {
      return torch::CppFunction([start, op = operator_.op()](Inputs inputs, Rest... rest) -> Result {
        return pending(call_start(start, op, inputs, rest...));
      });
    });
    operator_.set_kernel(Key::Meta, kernel<&Collective::meta>());
    operator_.set_kernel(Key::Autograd, kernel<&Collective::above_devices>());
    operator_.set_kernel(Key::CompositeImplicitAutograd, kernel<&Collective::traced>());
    if (forms_.is_in_core) {
      operator_.add_core_kernel(started(from_stack(start), as_registered));
    }
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(("funcol::" + operator_.name()).c_str(), "")
        .template typed<Result(Inputs, Rest...)>();
  }

  template <typename... Native, typename... Given>
  static StartedCollective call_start(StartedCollective (*start)(Native...), const char* op,
                                      const Given&... given) {
    return start(start_argument<Native>(given, op)...);
  }

  Operator operator_;
  Forms forms_;
  Handle handle_;
};

}  // namespace funcol

namespace funcol::call {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using c10::IValue;
using c10::SymIntArrayRef;
using Splits = at::OptionalSymIntArrayRef;
using Tensors = std::vector<Tensor>;

// input, reduce_op, group
extern const Collective<Tensor(const Tensor&, const IValue&, const IValue&)> all_reduce;
extern const Collective<Tensors(TensorList, const IValue&, const IValue&)> all_reduce_coalesced;
// input, group_size, group
extern const Collective<Tensor(const Tensor&, int64_t, const IValue&)> all_gather_into_tensor;
extern const Collective<Tensors(TensorList, int64_t, const IValue&)> all_gather_into_tensor_coalesced;
// input, dim, group, split_sizes
extern const Collective<Tensor(const Tensor&, int64_t, const IValue&, Splits)> all_gather_along_dim;
// input, reduce_op, group_size, group
extern const Collective<Tensor(const Tensor&, std::string_view, int64_t, const IValue&)>
    reduce_scatter_tensor;
extern const Collective<Tensors(TensorList, std::string_view, int64_t, const IValue&)>
    reduce_scatter_tensor_coalesced;
// input, reduce_op, dim, group, split_sizes
extern const Collective<Tensor(const Tensor&, const IValue&, int64_t, const IValue&, Splits)>
    reduce_scatter_along_dim;
// inputs, reduce_op, a dim for each, group
extern const Collective<Tensors(TensorList, const IValue&, IntArrayRef, const IValue&)>
    reduce_scatter_along_dims_coalesced;
// input, output_split_sizes, input_split_sizes, group
extern const Collective<Tensor(const Tensor&, SymIntArrayRef, SymIntArrayRef, const IValue&)>
    all_to_all_single;
// a tensor for each rank, output_split_sizes, group
extern const Collective<Tensors(TensorList, SymIntArrayRef, const IValue&)> all_to_all;
// input, the destination of each rank, group
extern const Collective<Tensor(const Tensor&, IntArrayRef, const IValue&)> permute_tensor;
// input, source, group
extern const Collective<Tensor(const Tensor&, int64_t, const IValue&)> broadcast;
// input, reduce_op, destination, group
extern const Collective<Tensor(const Tensor&, const IValue&, int64_t, const IValue&)> reduce;
// input, source or destination, dim, group, split_sizes
extern const Collective<Tensor(const Tensor&, int64_t, int64_t, const IValue&, Splits)> scatter;
extern const Collective<Tensor(const Tensor&, int64_t, int64_t, const IValue&, Splits)> gather;

}  // namespace funcol::call
