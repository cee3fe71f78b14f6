// The masked partials at both ends of a redistribution.
//
// A mask has the shape of the tensor that it was made with. A plan therefore applies the masks of src in its
// first steps and makes the masks of dst in its last steps.
#pragma once

#include "planner/search.h"

namespace funcol {

class Masks {
 public:
  // Throws std::invalid_argument if an axis keeps its mask while another axis changes the tensor.
  explicit Masks(const Redistribution& task);

  // Returns the redistribution between the ends: masks of src are applied, masks of dst are not made yet.
  const Redistribution& unmasked() const { return unmasked_; }

  const std::vector<int64_t>& applied_axes() const { return applied_; }
  const std::vector<int64_t>& masked_axes() const { return masked_; }

 private:
  Redistribution unmasked_;
  std::vector<int64_t> applied_;
  std::vector<int64_t> masked_;
};

}  // namespace funcol
