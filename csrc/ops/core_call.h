// Calls of PyTorch's _c10d_functional operators, of which the traced forms of collectives are made.
//
// Compilers, exporters and debug modes know those operators and their meaning. No function here runs a
// collective of funcol's, and results are plain tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymInt.h>

#include <string>
#include <vector>

namespace funcol::core {

using c10::IValue;

// Calls _c10d_functional::<name> with `arguments`; groups and reduce ops are turned into names, which all
// PyTorch releases accept and graphs can hold.
IValue call(const char* name, std::vector<IValue> arguments);

// Calls wait_tensor for a tensor, or for each tensor of a list. Returns the results.
IValue waited(const IValue& result);

// Returns waited(call(name, arguments)).
IValue call_and_wait(const char* name, std::vector<IValue> arguments);

// Returns `value`, the argument of this name, as call() passes it on. Raises NotImplementedError naming `op`
// for premul_sum.
IValue as_name(const IValue& value, const std::string& argument, const char* op);

at::Tensor wait_tensor(const at::Tensor& tensor);

// Returns a tensor as all backends can move it: complex numbers as pairs of reals, along one more dim; a
// 0-dim tensor as shape (1).
at::Tensor as_pairs(const at::Tensor& tensor);
// Returns the numbers in `moved`, which as_pairs(input) became: complex if `input` is.
at::Tensor from_pairs(const at::Tensor& moved, const at::Tensor& input);

// Returns `tensor` with zeros at the end of `dim`, up to `size`.
at::Tensor pad_to(const at::Tensor& tensor, int64_t dim, const c10::SymInt& size);

c10::SymInt largest(c10::SymIntArrayRef sizes);

}  // namespace funcol::core
