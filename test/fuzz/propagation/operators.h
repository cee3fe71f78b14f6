// Calls of operators, and what the operators compute: small slow kernels on tensors of numbers.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bytes.h"
#include "propagation/rules/calls.h"
#include "propagation/rules/numbers.h"

namespace funcol::test {

using Index = std::vector<int64_t>;

// An operator cannot run on these tensors.
class CannotRun : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An operator on the tensors of one rank, or on whole tensors. `shapes` are those of its results, which
// operators with sizes among their arguments (view, expand) are called with.
using Kernel =
    std::function<std::vector<Numbers>(const std::vector<Numbers>& inputs, const std::vector<Shape>& shapes)>;

struct Case {
  OpCall call;
  std::vector<Numbers> wholes;  // of call.tensors
  Kernel kernel;
  bool may_be_in_place = false;  // the first result may be written to the first tensor
  bool is_of_list = false;       // of an element of lists: in place it returns nothing
  bool changes_nothing = false;  // the result is the first tensor, in every layout
};

// Makes a call argument by argument. Numbers are multiples of kUnit; indices are not.
class CaseMaker {
 public:
  CaseMaker(Bytes& bytes, std::string op) : bytes_(bytes), call_(std::move(op)) {}

  CaseMaker& with(const std::string& name, const Shape& shape);
  CaseMaker& with_bools(const std::string& name, const Shape& shape);
  // Numbers from 0 to end - 1; all different where `once`.
  CaseMaker& with_indices(const std::string& name, const Shape& shape, int64_t end, bool once = false);
  CaseMaker& with_list(const std::string& name, const std::vector<Shape>& shapes);
  template <typename Value>
  CaseMaker& with_value(const std::string& name, Value value) {
    call_.with(name, std::move(value));
    return *this;
  }

  // The call, with the results of `kernel` on the whole tensors. `shapes`: of results that the kernel asks
  // for.
  Case gives(Kernel kernel, const std::vector<Shape>& shapes = {}, Dtype dtype = Dtype::kFloat32);

 private:
  Numbers numbers(const Shape& shape);

  Bytes& bytes_;
  CallOf call_;
  std::vector<Numbers> wholes_;
  uint64_t num_drawn_ = 0;
};

// A kernel with one result that asks for no shape.
Kernel plain(std::function<Numbers(const std::vector<Numbers>&)> kernel);

// Tensors

// A tensor of these numbers, by index.
Numbers made(const Shape& shape, const std::function<double(const Index&)>& number);
// The number at `index` of a tensor that is broadcast to the dims of `index`.
double broadcast_at(const Numbers& numbers, const Index& index);
Shape broadcast_shape(const std::vector<Numbers>& inputs);
double at(const Numbers& numbers, const Index& index);
// The number of the dim; throws CannotRun if the tensor has no such dim.
int64_t size_of(const Numbers& numbers, int64_t dim);
void need(bool holds, const std::string& what);

// Makes the call that of an element of lists, if there is such an operator with a rule:
// "aten::_foreach_add.List" for "aten::add.Tensor". Arguments get the names that they have there.
void put_in_list(Case& of);

// Families of operators

Case pointwise_case(Bytes& bytes);
Case product_case(Bytes& bytes);
Case reduction_case(Bytes& bytes);
Case view_case(Bytes& bytes);
Case joining_case(Bytes& bytes);
Case indexing_case(Bytes& bytes);

// A shape of 1 to 3 dims.
inline Shape some_shape(Bytes& bytes, int64_t least_dims = 1, int64_t most_dims = 3) {
  return shape_from(bytes, bytes.between(least_dims, most_dims), 96);
}

}  // namespace funcol::test
