// Remembered calls of composite operators on DTensors: see composites.h.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "dispatch/trace.h"
#include "pyobjects/specs.h"

namespace funcol::python {

// A bit for each tensor argument.
using Mask = uint64_t;
inline bool has_bit(Mask mask, size_t i) { return (mask >> i & 1) != 0; }

struct CompositeKind {
  const char* name;
  // The gradient of each of the first two operands reads the other one and nothing else, and that of any
  // other operand reads neither.
  bool is_bilinear;
  bool is_attention;  // chooses among kernels by PyTorch's global settings
  // Begins with log_softmax of the first operand, the logits, which nothing else reads. The node saves the
  // log-probabilities instead.
  bool is_loss;

  // Returns the inputs that the gradients in `needed` read, as PyTorch's derivatives save them.
  Mask saved_inputs(Mask needed) const {
    return is_bilinear ? (needed & 1) << 1 | (needed >> 1 & 1) : ~Mask{is_loss ? 1U : 0U};
  }
  // Returns true if the node saves what PyTorch saves for gradients of the inputs in `requires_grad`, so that
  // writes to other inputs raise no error.
  bool is_covered(Mask requires_grad) const { return (requires_grad & (is_bilinear ? 3 : 1)) != 0; }
};

// The values of the forward pass, besides inputs, that are saved for the backward pass.
struct SavedValues {
  LocalProgramPtr forward;      // computes the result and the values
  std::vector<ValueId> values;  // of a loss, the log-probabilities come first
  bool has_result = false;      // a value shares the result's memory
};

// The layout of an input. Zeros of this layout replace an input that was not saved.
struct InputLayout {
  explicit InputLayout(const at::Tensor& dtensor);
  at::Tensor zeros_like(py::handle mesh, at::Device device) const;

  SharedSpecPtr spec;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

// A remembered call of a composite operator with certain specs.
struct Composite {
  const CompositeKind* kind;
  c10::OperatorHandle op;
  uint64_t id;
  c10::SmallVector<size_t, 4> places;  // of the tensors among the arguments
  Mask requires_grad;
  Trace trace;
  ValueId result;
  std::vector<InputLayout> inputs;
  std::shared_ptr<const SavedValues> saved_values;
  bool falls_back = false;
  DescribedPtr handled;  // the operator whose handler made it fall back; null if none did

  size_t heap_bytes() const {
    return trace.heap_bytes() +
           (saved_values == nullptr ? 0 : sizeof(SavedValues) + saved_values->forward->heap_bytes()) +
           inputs.capacity() * (sizeof(InputLayout) + 3 * kBlockBytes);
  }
};
using CompositePtr = std::shared_ptr<Composite>;

// A scope in which this thread's composites run as PyTorch runs them.
class DecomposeGuard {
 public:
  DecomposeGuard() : before_(std::exchange(is_active, true)) {}
  ~DecomposeGuard() { is_active = before_; }
  DecomposeGuard(const DecomposeGuard&) = delete;
  DecomposeGuard& operator=(const DecomposeGuard&) = delete;

  static thread_local bool is_active;

 private:
  bool before_;
};

using CompositeInputs = c10::SmallVector<at::Tensor, 4>;

// Makes the node of `result`, which computes the gradients of `inputs`, the DTensors among the arguments.
// `arguments` has None in their place; `values` are the local tensors that `saved_values` lists.
void record_backward(const CompositePtr& composite, std::shared_ptr<const SavedValues> saved_values,
                     std::vector<c10::IValue> arguments, const CompositeInputs& inputs,
                     LocalProgram::Locals values, const at::Tensor& result);

}  // namespace funcol::python
