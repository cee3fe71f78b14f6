#include "transfer/run_batch.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "async/async_tensor.h"
#include "async/dispatch_modes.h"
#include "comm/orphaned_works.h"
#include "transfer/bundle.h"
#include "transfer/op_names.h"

namespace funcol {
namespace {

bool is_observed(const at::Tensor& tensor) {
  return tensor.is_meta() || belongs_to_layer(tensor) ||
         (at::GradMode::is_enabled() && tensor.requires_grad());
}

void check(const TransferItem& item, bool is_observed) {
  const auto& program = *item.program;
  TORCH_CHECK_NOT_IMPLEMENTED(!program.exchange || !is_observed, "funcol::", kRedistributeMany,
                              ": tensors move to their owners and back outside of "
                              "compiled regions and modes, and without gradients. Call it under "
                              "torch.no_grad(), and not while anything traces.");
  if (program.before) {
    program.before->check(item.local);
  }
}

}  // namespace

std::vector<at::Tensor> run_batch(const std::vector<TransferItem>& items, bool async_op,
                                  int64_t together_bytes) {
  const bool are_observed = has_active_layers() || std::ranges::any_of(items, [](const auto& item) {
                              return is_observed(item.local);
                            });
  for (const auto& item : items) {
    check(item, are_observed);
  }
  std::vector<at::Tensor> results(items.size());
  if (!are_observed) {
    sweep_some_orphans();
  }
  auto bundles = bundles_of(items, async_op, together_bytes, are_observed);
  run_steps(bundles, 0);
  for (auto& bundle : bundles) {
    bundle.collect_results(results);
  }
  return results;
}

}  // namespace funcol
