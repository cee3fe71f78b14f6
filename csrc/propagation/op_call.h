// A call of an operator as rules see it: the operator, its arguments, and the metadata of its tensors.
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

// A tensor argument: its index in OpCall::tensors.
struct TensorNumber {
  size_t number;

  friend bool operator==(const TensorNumber&, const TensorNumber&) = default;
};

// An argument: none, a tensor, a scalar, a string, a dtype, or a list of arguments. Memory formats and
// devices are strings, as PyTorch prints them.
struct Argument {
  using List = std::vector<Argument>;

  std::variant<std::monostate, TensorNumber, bool, int64_t, double, std::string, Dtype, List> value;

  bool is_none() const { return std::holds_alternative<std::monostate>(value); }
  bool is_tensor() const { return std::holds_alternative<TensorNumber>(value); }
  bool is_list() const { return std::holds_alternative<List>(value); }

  // Returns the value as this type. Throws std::invalid_argument if it has another type. number() takes an
  // int too, and integers() takes one int as a list of one.
  size_t tensor() const;
  bool boolean() const;
  int64_t integer() const;
  double number() const;
  std::vector<int64_t> integers() const;
  const List& list() const;

  friend bool operator==(const Argument&, const Argument&) = default;
};

struct OpCall {
  std::string op;  // qualified name with overload: "aten::add.Tensor"; "aten::relu" for the default overload

  // The arguments by name, in the order of the schema, with defaults filled in. out= arguments are left out.
  std::vector<std::pair<std::string, Argument>> args;

  // The tensors of `args` in their order, including those inside lists.
  std::vector<TensorMeta> tensors;

  // The outputs; a returned list counts as its elements. An output that is not a tensor (a number, or a
  // gradient that was not requested) has no value.
  std::vector<std::optional<TensorMeta>> outputs;

  // Returns the argument `name`. Throws std::invalid_argument naming the operator if it has no such argument.
  const Argument& arg(std::string_view name) const;
  bool has_arg(std::string_view name) const;
  // Returns the metadata of the tensor argument `name`.
  const TensorMeta& tensor(std::string_view name) const { return tensors[arg(name).tensor()]; }

  friend bool operator==(const OpCall&, const OpCall&) = default;
};

// Returns `dim` counted from 0. Throws std::out_of_range, naming the operator, if the tensor has no such dim.
// A scalar tensor has the dims 0 and -1.
int64_t counted_from_0(const OpCall& call, int64_t dim, int64_t num_dims);

// Returns the name without its overload: "aten::add_" for "aten::add_.Tensor".
inline std::string_view without_overload(std::string_view op) { return op.substr(0, op.find('.')); }

}  // namespace funcol
