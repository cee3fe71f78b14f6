#include <limits>

#include "kernels/box_rows.h"
#include "kernels/cuda/functions.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/move_vectors.h"

namespace funcol::kernels::cuda {
namespace {

// Launches a copy whose threads follow tensor order, for merges and for splits: a warp then touches one run
// of the tensor and one run per rank, however short the rows are. In rank-major order, short rows would
// scatter a warp over the tensor.
template <Change kChange, typename Vector>
const char* launch_as(const void* in, void* out, const ShardShape& shape, cudaStream_t stream) {
  if (shape.num_bytes() / int64_t{sizeof(Vector)} <= std::numeric_limits<int32_t>::max()) {
    return launch(MoveVectors<kChange, Vector, uint32_t>(in, out, shape), stream);
  }
  return launch(MoveVectors<kChange, Vector, uint64_t>(in, out, shape), stream);
}

template <Change kChange>
const char* change_layout(const void* in, void* out, const ShardShape& shape, void* opaque_stream) {
  if (shape.num_bytes() == 0) {
    return nullptr;
  }
  auto* const stream = static_cast<cudaStream_t>(opaque_stream);
  if (shape.num_ranks == 1 || shape.outer == 1) {  // both orders agree
    return error_text(
        cudaMemcpyAsync(out, in, static_cast<size_t>(shape.num_bytes()), cudaMemcpyDeviceToDevice, stream));
  }
  const RowBox row{.from = in, .to = out, .row_bytes = shape.row_bytes};
  return launch_in_vectors(vector_bytes(row), [&](auto vector) {
    return launch_as<kChange, decltype(vector)>(in, out, shape, stream);
  });
}

}  // namespace

const char* merge_shards(const void* in, void* out, const ShardShape& shape, void* stream) {
  return change_layout<Change::kMerge>(in, out, shape, stream);
}

const char* split_shards(const void* in, void* out, const ShardShape& shape, void* stream) {
  return change_layout<Change::kSplit>(in, out, shape, stream);
}

}  // namespace funcol::kernels::cuda
