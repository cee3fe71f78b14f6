#include "ops/meta.h"

#include "ops/backend_tensor.h"

namespace funcol {

at::Tensor meta_of_own_part(const at::Tensor& whole, int64_t dim, const c10d::ProcessGroup& group,
                            at::OptionalSymIntArrayRef split_sizes, const char* op) {
  check_has_dims(whole, op);
  dim = wrap_dim(dim, whole, op);
  auto sizes = whole.sym_sizes().vec();
  sizes[dim] = sizes_of_parts(sizes[dim], dim, split_sizes, group, op)[group.getRank()];
  return meta_of_sizes(whole, sizes);
}

}  // namespace funcol
