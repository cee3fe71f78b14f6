#include "transfer/box_copies.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>

#include "kernels/cuda_library.h"

namespace funcol {

void BoxCopies::add(const BoxCopy& box, const at::Tensor& from, int64_t from_begin, const at::Tensor& to,
                    int64_t to_begin) {
  if (!from.is_cuda() || !box.has_rows() || kernels::cuda_library().functions == nullptr) {
    box.run(from, from_begin, to, to_begin);
    return;
  }
  const auto itemsize = static_cast<int64_t>(from.itemsize());
  bool is_full = false;
  box.for_each_rows(static_cast<const char*>(from.const_data_ptr()) + from_begin * itemsize,
                    static_cast<char*>(to.mutable_data_ptr()) + to_begin * itemsize, itemsize,
                    [&](const kernels::RowBox& rows) {
                      auto& same_width =
                          waiting_[std::countr_zero(static_cast<uint64_t>(kernels::vector_bytes(rows)))];
                      same_width.push_back(rows);
                      is_full = is_full || same_width.size() >= kernels::kMaxBoxes;
                    });
  kept_.push_back(from);
  kept_.push_back(to);
  if (is_full) {
    flush();
  }
}

void BoxCopies::flush() {
  if (kept_.empty()) {
    return;
  }
  const auto device = kept_[0].device();
  const c10::DeviceGuard guard(device);
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  for (auto& rows : waiting_) {
    for (size_t begin = 0; begin < rows.size(); begin += kernels::kMaxBoxes) {
      const char* error = kernels::cuda_library().functions->copy_boxes(
          &rows[begin], std::min(rows.size() - begin, kernels::kMaxBoxes), stream.native_handle());
      TORCH_CHECK(error == nullptr, "funcol: the kernel that copies boxes failed on ", device, ": ", error);
    }
    rows.clear();
  }
  kept_.clear();
}

}  // namespace funcol
