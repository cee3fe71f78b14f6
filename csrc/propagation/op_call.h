// A call of an operator as rules see it: which operator, its arguments, and what its tensors look like.
//
// Worked case, torch.sum(x, [0], keepdim=True) of an f32[8, 4]: op "aten::sum.dim_IntList", args
// {"self": tensor 0, "dim": [0], "keepdim": true, "dtype": none}, tensors {f32[8, 4]}, outputs {f32[1, 4]}.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "layout/tensor_meta.h"

namespace funcol {

// A tensor among the arguments: its number in OpCall::tensors.
struct TensorNumber {
  size_t number;

  friend bool operator==(const TensorNumber&, const TensorNumber&) = default;
};

// An argument: none, a tensor, a scalar, a string (memory formats and devices too, as PyTorch prints them), a
// dtype, or a list of arguments.
struct Argument {
  using List = std::vector<Argument>;

  std::variant<std::monostate, TensorNumber, bool, int64_t, double, std::string, Dtype, List> value;

  bool is_none() const { return std::holds_alternative<std::monostate>(value); }
  bool is_tensor() const { return std::holds_alternative<TensorNumber>(value); }
  bool is_list() const { return std::holds_alternative<List>(value); }

  // Each throws std::invalid_argument if the argument is something else. An int serves where a double is
  // asked for; one int serves as a list of one.
  size_t tensor() const;
  bool boolean() const;
  int64_t integer() const;
  double number() const;
  std::vector<int64_t> integers() const;
  const List& list() const;

  friend bool operator==(const Argument&, const Argument&) = default;
};

struct OpCall {
  std::string op;  // qualified, with its overload: "aten::add.Tensor", "aten::relu" for the default one

  // Every argument of the schema by name, in its order; defaults are filled in. Tensors that are given to
  // write the result to (out=) are left out.
  std::vector<std::pair<std::string, Argument>> args;

  // The tensors among `args` in their order, also those inside lists.
  std::vector<TensorMeta> tensors;

  // What is returned: tensors of a returned list one by one; nothing where the operator returns no tensor
  // (a masked-off gradient, a number).
  std::vector<std::optional<TensorMeta>> outputs;

  // Throws std::invalid_argument naming the operator if it has no such argument.
  const Argument& arg(std::string_view name) const;
  bool has_arg(std::string_view name) const;
  // What the tensor argument `name` looks like.
  const TensorMeta& tensor(std::string_view name) const { return tensors[arg(name).tensor()]; }

  friend bool operator==(const OpCall&, const OpCall&) = default;
};

// `dim` counted from 0. Throws std::out_of_range naming the operator if the tensor has no such dim; a scalar
// has the dims 0 and -1.
int64_t counted_from_0(const OpCall& call, int64_t dim, int64_t num_dims);

}  // namespace funcol
