// From a started collective to what the caller holds.
#include "async/async_tensor.h"
#include "comm/orphaned_works.h"
#include "ops/collectives.h"

namespace funcol {

std::vector<at::Tensor> as_pending(Start start) {
  sweep_some_orphans();
  std::vector<at::Tensor> results;
  results.reserve(start.outputs.size());
  const auto outputs = start.outputs;
  auto pending = c10::make_intrusive<PendingCollective>(std::move(start));
  for (const auto& output : outputs) {
    results.push_back(AsyncTensorImpl::wrap(output, pending));
  }
  return results;
}

at::Tensor as_sole_pending(Start start) {
  sweep_some_orphans();
  const auto output = start.outputs[0];
  return AsyncTensorImpl::wrap(output, c10::make_intrusive<PendingCollective>(std::move(start)));
}

std::vector<at::Tensor> as_registered(const Start& start) {
  TORCH_INTERNAL_ASSERT(!start.epilogue, "PyTorch's registry cannot run the epilogue of ", start.op);
  for (const auto& output : start.outputs) {
    c10d::register_work(output, start.work);
  }
  return start.outputs;
}

at::Tensor wait_tensor(const at::Tensor& tensor) {
  settle(tensor);
  return c10d::wait_tensor(tensor);
}

}  // namespace funcol
