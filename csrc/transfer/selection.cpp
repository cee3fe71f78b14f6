#include "transfer/selection.h"

#include <ATen/ops/cat.h>

#include <algorithm>

namespace funcol {

at::Tensor select(const at::Tensor& tensor, const Selection& selection) {
  at::Tensor selected = tensor;
  for (const auto& [dim, positions] : selection) {
    if (positions.size() <= 1) {
      const auto run = positions.empty() ? Interval{} : positions.front();
      selected = selected.narrow(dim, run.begin, run.size);
      continue;
    }
    std::vector<at::Tensor> runs;
    for (const auto& run : positions) {
      runs.push_back(selected.narrow(dim, run.begin, run.size));
    }
    selected = at::cat(runs, dim);
  }
  return selected;
}

bool select_copies(const Selection& selection) {
  return std::ranges::any_of(selection,
                             [](const DimSelection& of_dim) { return of_dim.positions.size() > 1; });
}

}  // namespace funcol
