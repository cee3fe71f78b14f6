// What runs between a collective's end and the first use of its result.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <utility>

#include "ops/wire.h"

namespace funcol {

// `fill` writes `out` from `received`, on the stream that is current when the epilogue runs.
template <typename Fill>
std::function<void()> on_current_stream(const at::Tensor& received, const at::Tensor& out, Fill fill) {
  if (out.is_cpu()) {
    return [fill = std::move(fill)] {
      const BelowAutograd below_autograd;
      fill();
    };
  }
  const c10::impl::VirtualGuardImpl device(out.device().type());
  const auto start_stream = device.getStream(out.device());
  return [=] {
    const BelowAutograd below_autograd;
    fill();
    const auto stream = device.getStream(out.device());
    if (stream != start_stream) {  // the allocator knows of the stream that a tensor was made on only
      device.recordDataPtrOnStream(received.storage().data_ptr(), stream);
      device.recordDataPtrOnStream(out.storage().data_ptr(), stream);
    }
  };
}

}  // namespace funcol
