#include "transfer/bucket.h"

#include <limits>
#include <utility>

#include "comm/orphaned_works.h"

namespace funcol {

void Bucket::start() {
  sweep_some_orphans();
  auto bundles = bundles_of(items_, /*async_op=*/false, std::numeric_limits<int64_t>::max());
  run_steps(bundles, 1);
  for (auto& bundle : bundles) {
    if (bundle.num_steps() == 0) {
      continue;
    }
    auto results = bundle.start_last_step();
    for (const size_t item : bundle.indices()) {
      moving_of_[item] = static_cast<int64_t>(moving_.size());
      items_[item].local.reset();  // it is packed
    }
    moving_.push_back({std::move(bundle), std::move(results)});
  }
}

at::Tensor Bucket::next() {
  if (num_returned_ == items_.size()) {
    return {};
  }
  const auto index = moving_of_[num_returned_];
  auto& local = items_[num_returned_++].local;
  if (index == -1) {
    return std::move(local);
  }
  auto& moving = moving_[index];
  const size_t item = moving.num_returned++;
  return moving.bundle.complete_last(item, moving.results.next());
}

}  // namespace funcol
