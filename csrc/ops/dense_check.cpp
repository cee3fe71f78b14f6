#include "ops/dense_check.h"

#include <string>

namespace funcol {
namespace {

using Key = c10::DispatchKey;

constexpr c10::DispatchKeySet kOtherKinds({Key::Sparse, Key::SparseCsr, Key::Quantized, Key::NestedTensor,
                                           Key::MkldnnCPU});

struct TensorKind {
  std::string name;
  const char* remedy;
};

TensorKind kind_of(const at::Tensor& tensor) {
  if (tensor.is_quantized()) {
    return {c10::str("quantized (", tensor.scalar_type(), ")"),
            "t.int_repr() where scales agree, or t.dequantize()"};
  }
  if (tensor.is_nested()) {
    return {"nested", "the dense tensor behind it, t.values(), or a padded one"};
  }
  return {c10::str("of layout ", tensor.layout()), "t.to_dense(), or the dense tensors it is made of"};
}

[[noreturn]] void refuse(const at::Tensor& tensor, const char* op) {
  const auto kind = kind_of(tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "funcol::", op, ": a tensor is ", kind.name,
                              ". Collectives carry dense tensors. Pass ", kind.remedy, ".");
}

}  // namespace

void check_dense(at::TensorList tensors, const char* op) {
  for (const auto& tensor : tensors) {
    if (tensor.key_set().has_any(kOtherKinds)) {
      refuse(tensor, op);
    }
  }
}

}  // namespace funcol
