#include "async/wake_kernels.h"

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
#include "async/wake_fallback.h"
#include "async/wake_key.h"

namespace funcol {
namespace {

template <typename T>
concept IsTensor = std::is_same_v<std::remove_cvref_t<T>, at::Tensor>;

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
    return Op::redispatch(keys & kKeysBelowWake, std::forward<Args>(args)...);
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
  namespace ops = at::_ops;
  static torch::Library library(torch::Library::IMPL, "aten", kWakeKey, __FILE__, __LINE__);
  add_kernels<ops::_to_copy, ops::add_Tensor, ops::add__Tensor, ops::addmm, ops::bmm, ops::clone, ops::copy_,
              ops::div_Tensor, ops::div__Tensor, ops::mm, ops::mul_Tensor, ops::mul__Tensor, ops::sub_Tensor,
              ops::sum, ops::sum_dim_IntList>(library);
}

}  // namespace funcol
