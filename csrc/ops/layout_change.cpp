#include "ops/layout_change.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "kernels/cuda_library.h"
#include "kernels/rank_major.h"
#include "ops/backend_tensor.h"

namespace funcol {
namespace {

using kernels::ShardShape;

// The size up to which copying to the stack and back is faster than allocating memory.
constexpr int64_t kFewBytes = 4096;

// Returns the shape of the blocks of a tensor of `sizes` cut into num_ranks equal parts along `dim`.
ShardShape shard_shape(at::IntArrayRef sizes, int64_t num_ranks, int64_t dim, size_t itemsize) {
  return {num_ranks, c10::multiply_integers(sizes.slice(0, dim)),
          c10::multiply_integers(sizes.slice(dim)) / num_ranks * static_cast<int64_t>(itemsize)};
}

using CpuKernel = void (*)(const void*, void*, const ShardShape&, int64_t, int64_t);
using CudaKernel = decltype(&kernels::CudaFunctions::merge_shards);

// Runs the device's kernel. Returns false if there is none: the caller then copies with ATen.
bool run_kernel(const at::Tensor& in, const at::Tensor& out, const ShardShape& shape, CpuKernel on_cpu,
                CudaKernel on_cuda) {
  if (shape.num_bytes() == 0) {
    return true;
  }
  if (in.is_cpu()) {
    constexpr int64_t kBytesPerTask = int64_t{256} * 1024;
    const auto grain = std::max<int64_t>(1, kBytesPerTask / shape.row_bytes);
    if (shape.num_rows() <= grain) {
      on_cpu(in.const_data_ptr(), out.mutable_data_ptr(), shape, 0, shape.num_rows());
      return true;
    }
    at::parallel_for(0, shape.num_rows(), grain, [&](int64_t begin, int64_t end) {
      on_cpu(in.const_data_ptr(), out.mutable_data_ptr(), shape, begin, end);
    });
    return true;
  }
  const auto* const functions = in.is_cuda() ? kernels::cuda_library().functions : nullptr;
  if (functions != nullptr) {
    const c10::DeviceGuard device(in.device());
    const auto stream = c10::impl::VirtualGuardImpl(in.device().type()).getStream(in.device());
    const char* error =
        (functions->*on_cuda)(in.const_data_ptr(), out.mutable_data_ptr(), shape, stream.native_handle());
    TORCH_CHECK(error == nullptr, "funcol: the layout kernel failed on ", in.device(), ": ", error);
    return true;
  }
  return false;
}

// Returns the tensor with `dim` cut into (num_ranks, rest) and the ranks moved to the front.
at::Tensor rank_major_view(const at::Tensor& tensor, int64_t num_ranks, int64_t dim) {
  return tensor.unflatten(dim, {num_ranks, tensor.size(dim) / num_ranks}).movedim(dim, 0);
}

}  // namespace

bool is_rank_major(at::IntArrayRef sizes, int64_t dim) {
  return std::all_of(sizes.begin(), sizes.begin() + dim, [](int64_t size) { return size == 1; });
}

void merge_shards(const at::Tensor& gathered, const at::Tensor& out, int64_t num_ranks, int64_t dim) {
  const auto shape = shard_shape(out.sizes(), num_ranks, dim, out.itemsize());
  if (!run_kernel(gathered, out, shape, kernels::merge_shards, &kernels::CudaFunctions::merge_shards)) {
    auto target = rank_major_view(out, num_ranks, dim);
    target.copy_(gathered.view(target.sizes()));
  }
}

bool merges_in_place(const at::Tensor& gathered) {
  return gathered.is_cpu() && static_cast<int64_t>(gathered.nbytes()) <= kFewBytes;
}

void merge_shards_in_place(const at::Tensor& out, int64_t num_ranks, int64_t dim) {
  const auto shape = shard_shape(out.sizes(), num_ranks, dim, out.itemsize());
  TORCH_INTERNAL_ASSERT(shape.num_bytes() <= kFewBytes);
  if (shape.num_bytes() > 0) {
    alignas(std::max_align_t) std::array<std::byte, kFewBytes> gathered;
    std::memcpy(gathered.data(), out.const_data_ptr(), shape.num_bytes());
    kernels::merge_shards(gathered.data(), out.mutable_data_ptr(), shape, 0, shape.num_rows());
  }
}

at::Tensor split_shards(const at::Tensor& tensor, int64_t num_ranks, int64_t dim) {
  auto sizes = tensor.sizes().vec();
  sizes[dim] /= num_ranks;
  sizes[0] *= num_ranks;
  auto out = at::empty(sizes, tensor.options());
  const auto shape = shard_shape(tensor.sizes(), num_ranks, dim, tensor.itemsize());
  if (!is_plain_in_memory(tensor) ||
      !run_kernel(tensor, out, shape, kernels::split_shards, &kernels::CudaFunctions::split_shards)) {
    const auto source = rank_major_view(tensor, num_ranks, dim);
    out.view(source.sizes()).copy_(source);
  }
  return out;
}

}  // namespace funcol
