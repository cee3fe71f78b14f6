// Masked partials, which a plan meets at its ends alone: a mask is applied before anything else, since it has
// the shape of the tensor that it was made with, and made after everything else.
#pragma once

#include "planner/search.h"

namespace funcol {

class Masks {
 public:
  // Throws std::invalid_argument where a mask would have to stay on a tensor that changes.
  explicit Masks(const Redistribution& task);

  // The redistribution between the ends: masks of src applied, those of dst not yet made.
  const Redistribution& unmasked() const { return unmasked_; }

  const std::vector<int64_t>& applied_axes() const { return applied_; }
  const std::vector<int64_t>& masked_axes() const { return masked_; }

 private:
  Redistribution unmasked_;
  std::vector<int64_t> applied_;
  std::vector<int64_t> masked_;
};

}  // namespace funcol
