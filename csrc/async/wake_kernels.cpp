// The unboxed kernels at the wake key (wake_fallback.h).
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>

#include <string>
#include <type_traits>
#include <utility>

#include "async/comm_tensor.h"
#include "async/dispatch_modes.h"
#include "async/wake_fallback.h"
#include "async/wake_key.h"

namespace funcol {
namespace {

namespace ops = at::_ops;

template <typename T>
concept IsTensor = std::is_same_v<std::remove_cvref_t<T>, at::Tensor>;

template <typename Op, typename... Ops>
concept IsOneOf = (std::is_same_v<Op, Ops> || ...);

template <typename Op>
concept IsArithmetic = IsOneOf<Op, ops::add_Tensor, ops::add__Tensor, ops::div_Tensor, ops::div__Tensor,
                               ops::mul_Tensor, ops::mul__Tensor, ops::sub_Tensor>;

// Returns true if CPU arithmetic would first convert the number beside the tensor, such as the number of
// ranks that a sum is divided by. The conversion takes as long as the rest of a small operator. Narrower
// floats compute with the number as it was written.
bool is_converted(const at::Tensor& number, const at::Tensor& tensor) {
  const auto is_one_of = [](const at::Tensor& one, at::ScalarType first, at::ScalarType second) {
    return one.scalar_type() == first || one.scalar_type() == second;
  };
  return number.unsafeGetTensorImpl()->is_wrapped_number() && number.scalar_type() != tensor.scalar_type() &&
         is_one_of(number, at::kLong, at::kDouble) && is_one_of(tensor, at::kFloat, at::kDouble) &&
         number.is_cpu() && tensor.is_cpu() && !number.requires_grad() && !number._is_zerotensor() &&
         !has_watching_layers() && !belongs_to_layer(tensor);
}

template <typename To, typename From>
c10::Storage storage_of(From value) {
  auto* const number = new To(c10::convert<To>(value));
  const auto free_number = [](void* pointer) { delete static_cast<To*>(pointer); };
  return {c10::Storage::use_byte_size_t(), sizeof(To), c10::DataPtr(number, number, free_number, at::kCPU)};
}

template <typename To>
c10::Storage converted_storage(const at::Tensor& number) {
  return number.scalar_type() == at::kLong ? storage_of<To>(*number.const_data_ptr<int64_t>())
                                           : storage_of<To>(*number.const_data_ptr<double>());
}

// Returns the number, converted as by ATen, without an operator and without memory aligned for vectors.
at::Tensor converted(const at::Tensor& number, at::ScalarType type) {
  auto storage = type == at::kFloat ? converted_storage<float>(number) : converted_storage<double>(number);
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage),
                                                         number.key_set(), c10::scalarTypeToTypeMeta(type));
  result.unsafeGetTensorImpl()->set_sizes_contiguous({});
  result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

// Returns true if autograd comes next, and after it the backend's kernel.
bool is_autograd_next(c10::DispatchKeySet keys) {
  constexpr auto kAutogradAndBelow =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::after_ADInplaceOrView_keyset;
  return keys.has_any(c10::autograd_dispatch_keyset) && kAutogradAndBelow.has_all(keys);
}

// A kernel that waits for the tensors, then computes. It skips autograd if autograd knows none of the
// tensors, and so would do nothing.
template <typename Op, typename Signature = typename Op::schema>
struct WakeKernel;

template <typename Op, typename Return, typename... Args>
struct WakeKernel<Op, Return(Args...)> {
  static Return run(c10::DispatchKeySet keys, Args... args) {
    if ((is_for_fallback(args) || ...)) {
      static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
      static const auto fallback = c10::BoxedKernel::makeFromFunction<&wake>();
      return c10::impl::BoxedKernelWrapper<Return(Args...)>::call(fallback, op, keys,
                                                                  std::forward<Args>(args)...);
    }
    (make_plain(args), ...);
    keys = keys & kKeysBelowWake;
    if constexpr (!std::is_reference_v<Return>) {  // a tensor that is written counts its versions
      if (is_autograd_next(keys) && !(is_known_to_autograd(args) || ...)) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        return compute(keys & c10::after_ADInplaceOrView_keyset, std::forward<Args>(args)...);
      }
    }
    return compute(keys, std::forward<Args>(args)...);
  }

 private:
  template <typename T>
  static bool is_for_fallback(const T& argument) {
    if constexpr (IsTensor<T>) {
      return is_comm_tensor(argument);
    } else {
      return false;
    }
  }

  template <typename T>
  static bool is_known_to_autograd(const T& argument) {
    if constexpr (IsTensor<T>) {
      return argument.defined() && argument.unsafeGetTensorImpl()->autograd_meta() != nullptr;
    } else {
      return false;
    }
  }

  static Return compute(c10::DispatchKeySet keys, Args... args) {
    if constexpr (IsArithmetic<Op>) {
      return compute_arithmetic(keys, args...);
    } else {
      return Op::redispatch(keys, std::forward<Args>(args)...);
    }
  }

  template <typename Tensor, typename... Rest>
  static Return compute_arithmetic(c10::DispatchKeySet keys, Tensor& tensor, const at::Tensor& other,
                                   const Rest&... rest) {
    return is_converted(other, tensor)
               ? Op::redispatch(keys, tensor, converted(other, tensor.scalar_type()), rest...)
               : Op::redispatch(keys, tensor, other, rest...);
  }

  template <typename T>
  static void make_plain(const T& argument) {
    static_assert(!std::is_convertible_v<T, at::TensorList> || IsTensor<T>, "lists are for the fallback");
    if constexpr (IsTensor<T>) {
      settle_for_reader(argument);
    }
  }
};

template <typename Op>
void add_kernel(torch::Library& library) {
  const std::string overload = Op::overload_name;
  const auto name = overload.empty() ? std::string(Op::name) : c10::str(Op::name, ".", overload);
  library.impl(name.c_str(), TORCH_FN(WakeKernel<Op>::run));
}

template <typename... Ops>
void add_kernels(torch::Library& library) {
  (add_kernel<Ops>(library), ...);
}

}  // namespace

void add_wake_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", kWakeKey, __FILE__, __LINE__);
  add_kernels<ops::_to_copy, ops::add_Tensor, ops::add__Tensor, ops::addmm, ops::bmm, ops::clone, ops::copy_,
              ops::div_Tensor, ops::div__Tensor, ops::mm, ops::mul_Tensor, ops::mul__Tensor, ops::sub_Tensor,
              ops::sum, ops::sum_dim_IntList>(library);
}

}  // namespace funcol
