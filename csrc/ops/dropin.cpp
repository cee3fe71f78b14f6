#include "ops/dropin.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "async/arguments.h"
#include "ops/collectives.h"
#include "ops/forward_mode.h"
#include "ops/legacy.h"
#include "ops/op_name.h"

namespace funcol {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Arguments = c10::ArrayRef<IValue>;

// The kernels read their arguments from the stack, because group and reduce op are `str` or `Any` in the
// schema, depending on the PyTorch minor.

std::vector<int64_t> ints(const IValue& list) {
  if (list.isIntList()) {
    return list.toIntVector();
  }
  return C10_AS_INTARRAYREF_SLOW(list.toSymIntVector()).vec();
}

std::vector<std::string> strings(const IValue& list) {
  std::vector<std::string> result;
  for (const IValue& item : list.toListRef()) {
    result.push_back(item.toStringRef());
  }
  return result;
}

// The only output of `start`, registered.
IValue sole(const Start& start) { return as_registered(start)[0]; }

// The same, where it is a tensor of the caller.
IValue sole_overwritten(const Start& start) { return as_overwritten(start)[0]; }

IValue all_reduce(Arguments in, const char* op) {
  return sole(
      start_all_reduce(in[0].toTensor(), reduce_op_from_ivalue(in[1], op), group_from_ivalue(in[2], op)));
}

IValue all_reduce_(Arguments in, const char* op) {
  return sole_overwritten(
      start_all_reduce_(in[0].toTensor(), reduce_op_from_ivalue(in[1], op), group_from_ivalue(in[2], op)));
}

IValue all_reduce_coalesced(Arguments in, const char* op) {
  return as_registered(start_all_reduce_coalesced(in[0].toTensorVector(), reduce_op_from_ivalue(in[1], op),
                                                  group_from_ivalue(in[2], op)));
}

IValue all_reduce_coalesced_(Arguments in, const char* op) {
  return as_overwritten(start_all_reduce_coalesced_(in[0].toTensorVector(), reduce_op_from_ivalue(in[1], op),
                                                    group_from_ivalue(in[2], op)));
}

IValue all_gather_into_tensor(Arguments in, const char* op) {
  return sole(start_all_gather(in[0].toTensor(), 0, group_of_size(in[2], in[1].toInt(), op)));
}

IValue all_gather_into_tensor_out(Arguments in, const char* op) {
  return sole_overwritten(
      start_all_gather_out(in[0].toTensor(), in[3].toTensor(), group_of_size(in[2], in[1].toInt(), op)));
}

IValue all_gather_into_tensor_coalesced(Arguments in, const char* op) {
  return as_registered(
      start_all_gather_coalesced(in[0].toTensorVector(), group_of_size(in[2], in[1].toInt(), op)));
}

IValue reduce_scatter_tensor(Arguments in, const char* op) {
  return sole(start_reduce_scatter(in[0].toTensor(), reduce_op_from_ivalue(in[1], op), 0,
                                   group_of_size(in[3], in[2].toInt(), op)));
}

IValue reduce_scatter_tensor_out(Arguments in, const char* op) {
  return sole_overwritten(start_reduce_scatter_out(in[0].toTensor(), reduce_op_from_ivalue(in[1], op),
                                                   in[4].toTensor(),
                                                   group_of_size(in[3], in[2].toInt(), op)));
}

IValue reduce_scatter_tensor_coalesced(Arguments in, const char* op) {
  const auto inputs = in[0].toTensorVector();
  const std::vector<int64_t> dims(inputs.size(), 0);
  return as_registered(start_reduce_scatter_coalesced(inputs, reduce_op_from_ivalue(in[1], op), dims,
                                                      group_of_size(in[3], in[2].toInt(), op)));
}

IValue all_to_all_single(Arguments in, const char* op) {
  return sole(start_all_to_all(in[0].toTensor(), ints(in[1]), ints(in[2]), group_from_ivalue(in[3], op)));
}

IValue broadcast(Arguments in, const char* op) {
  return sole(start_broadcast(in[0].toTensor(), in[1].toInt(), group_from_ivalue(in[2], op)));
}

IValue broadcast_(Arguments in, const char* op) {
  return sole_overwritten(start_broadcast_(in[0].toTensor(), in[1].toInt(), group_from_ivalue(in[2], op)));
}

IValue isend(Arguments in, const char* op) {
  return sole(start_send(in[0].toTensor(), in[1].toInt(), in[2].toInt(), group_from_ivalue(in[3], op)));
}

IValue irecv(Arguments in, const char* op) {
  return sole_overwritten(
      start_receive(in[0].toTensor(), in[1].toInt(), in[2].toInt(), group_from_ivalue(in[3], op)));
}

IValue batch_p2p_ops(Arguments in, const char* op) {
  return as_overwritten(start_batch_p2p(strings(in[0]), ints(in[1]), ints(in[2]), in[3].toTensorVector(),
                                        group_from_ivalue(in[4], op)));
}

IValue wait_tensor(Arguments in, const char* /*op*/) { return funcol::wait_tensor(in[0].toTensor()); }

IValue wait_tensors(Arguments in, const char* /*op*/) {
  auto tensors = in[0].toTensorVector();
  for (const auto& tensor : tensors) {
    funcol::wait_tensor(tensor);
  }
  return tensors;
}

std::atomic<TranslateError> translate_error{nullptr};

template <IValue (*kernel)(Arguments, const char*)>
IValue run(Arguments arguments, const char* op) {
  try {
    if (kernel != wait_tensor && kernel != wait_tensors) {
      for (const auto& argument : arguments) {
        visit_tensors(argument, [op](const at::Tensor& tensor) { check_no_tangents(tensor, op); });
      }
    }
    return kernel(arguments, op);
  } catch (const c10::Error& error) {
    if (const auto translate = translate_error.load()) {
      translate(error);
    }
    throw;
  }
}

template <IValue (*kernel)(Arguments, const char*)>
void boxed(const c10::OperatorHandle& op, Stack* stack) {
  const auto num_arguments = op.schema().arguments().size();
  const auto name = unqualified_name(op);
  auto result = run<kernel>(torch::jit::last(*stack, num_arguments), name.c_str());
  torch::jit::drop(*stack, num_arguments);
  stack->push_back(std::move(result));
}

struct Served {
  const char* name;
  torch::CppFunction (*kernel)();
};

template <IValue (*kernel)(Arguments, const char*)>
constexpr Served serve(const char* name) {
  return {name, [] { return torch::CppFunction::makeFromBoxedFunction<&boxed<kernel>>(); }};
}

constexpr Served kServed[] = {
    serve<all_reduce>("all_reduce"),
    serve<all_reduce_>("all_reduce_"),
    serve<all_reduce_coalesced>("all_reduce_coalesced"),
    serve<all_reduce_coalesced_>("all_reduce_coalesced_"),
    serve<all_gather_into_tensor>("all_gather_into_tensor"),
    serve<all_gather_into_tensor_out>("all_gather_into_tensor_out"),
    serve<all_gather_into_tensor_coalesced>("all_gather_into_tensor_coalesced"),
    serve<reduce_scatter_tensor>("reduce_scatter_tensor"),
    serve<reduce_scatter_tensor_out>("reduce_scatter_tensor_out"),
    serve<reduce_scatter_tensor_coalesced>("reduce_scatter_tensor_coalesced"),
    serve<all_to_all_single>("all_to_all_single"),
    serve<broadcast>("broadcast"),
    serve<broadcast_>("broadcast_"),
    serve<isend>("isend"),
    serve<irecv>("irecv"),
    serve<batch_p2p_ops>("batch_p2p_ops"),
    serve<wait_tensor>("wait_tensor"),
    serve<wait_tensors>("wait_tensors"),
};

constexpr Served kServedWithAutograd[] = {
    serve<all_gather_into_tensor>("all_gather_into_tensor"),
    serve<reduce_scatter_tensor>("reduce_scatter_tensor"),
    serve<all_to_all_single>("all_to_all_single"),
};

// Kernels that are registered for as long as this lives.
class KernelsUnderCore {
 public:
  explicit KernelsUnderCore(const std::vector<std::string>& left) {
    using Key = c10::DispatchKey;
    for (const auto key : {Key::CPU, Key::CUDA}) {
      add(library("_c10d_functional", key), "_c10d_functional::", kServed, left);
      add(library("_c10d_functional_autograd", key), "_c10d_functional_autograd::", kServedWithAutograd,
          left);
    }
    // The legacy operators become core's above autograd: one that has a kernel for a device needs one there
    // too.
    for (const auto key : {Key::CPU, Key::CUDA, Key::AutogradCPU, Key::AutogradCUDA}) {
      register_legacy_kernels(library("c10d_functional", key));
    }
  }

 private:
  torch::Library& library(const char* name_space, c10::DispatchKey key) {
    return libraries_.emplace_back(torch::Library::IMPL, name_space, key, __FILE__, __LINE__);
  }

  static void add(torch::Library& library, const std::string& prefix, c10::ArrayRef<Served> all,
                  const std::vector<std::string>& left) {
    for (const auto& served : all) {
      if (std::ranges::find(left, prefix + served.name) == left.end()) {
        library.impl(served.name, served.kernel());
      }
    }
  }

  std::vector<torch::Library> libraries_;
};

// A thread that let go of the GIL to call an operator, and has not yet read which kernel serves it, may read
// half of a kernel while the tables change. As long as this thread has the GIL no other one gets there; those
// that are there need a fraction of a microsecond to get past it, and nothing but a free core.
void let_calls_pass() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

std::unique_ptr<KernelsUnderCore>& kernels_under_core() {
  static std::unique_ptr<KernelsUnderCore> kernels;
  return kernels;
}

}  // namespace

void put_under_core_ops(const std::vector<std::string>& left) {
  if (kernels_under_core() == nullptr) {
    let_calls_pass();
    kernels_under_core() = std::make_unique<KernelsUnderCore>(left);
  }
}

void take_from_core_ops() {
  if (kernels_under_core() != nullptr) {
    let_calls_pass();
    kernels_under_core().reset();
  }
}

void set_error_translation(TranslateError translate) { translate_error.store(translate); }

std::vector<std::string> ops_under_dropin() {
  std::vector<std::string> ops;
  for (const auto& served : kServed) {
    ops.push_back(std::string("_c10d_functional::") + served.name);
  }
  for (const auto& served : kServedWithAutograd) {
    ops.push_back(std::string("_c10d_functional_autograd::") + served.name);
  }
  for (const auto& name : legacy_op_names()) {
    ops.push_back("c10d_functional::" + name);
  }
  return ops;
}

}  // namespace funcol
