// Layouts, reductions, cost models and numbers of a redistribution, drawn from a fuzzer's input.
#pragma once

#include <utility>
#include <vector>

#include "bytes.h"
#include "layout/tensor_meta.h"
#include "planner/cost_model.h"
#include "planner/tasks.h"
#include "simulated_ranks.h"

namespace funcol::test {

inline PartialOp reduction_from(Bytes& bytes) {
  return bytes.one_of<PartialOp>({PartialOp::kSum, PartialOp::kAvg, PartialOp::kMax, PartialOp::kMin,
                                  PartialOp::kSum, PartialOp::kProduct, PartialOp::kBand, PartialOp::kBor,
                                  PartialOp::kBxor});
}

struct LayoutChoices {
  PartialOp op;  // of all partials
  bool strided;
  bool masked;  // one mask at most, of a sum, on an axis where it masks something
};

inline Layout layout_from(Bytes& bytes, const Mesh& mesh, int64_t num_dims, const LayoutChoices& choices) {
  std::vector<Placement> placements;
  bool has_mask = false;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    switch (bytes.below(num_dims == 0 ? 3 : 8)) {
      case 0:
        placements.push_back(Placement::replicate());
        break;
      case 1:
        placements.push_back(Placement::partial(choices.op));
        break;
      case 2: {
        const bool masks = choices.masked && choices.op == PartialOp::kSum && !has_mask &&
                           mesh.sizes[axis] > 1 && bytes.coin();
        has_mask = has_mask || masks;
        placements.push_back(Placement::partial(choices.op, masks ? 1 : 0));
        break;
      }
      default: {
        const int64_t dim = bytes.below(num_dims);
        placements.push_back(
            Placement::shard(dim, choices.strided ? bytes.one_of<int64_t>({1, 2, 1, 3, 4}) : 1));
      }
    }
  }
  auto order = order_from(bytes, placements);
  return make_layout("fuzz", std::move(placements), std::move(order), mesh, num_dims);
}

inline CostModel model_from(Bytes& bytes, const Mesh& mesh) {
  switch (bytes.below(4)) {
    case 0:
      return StepCounts{};
    case 1:
      return default_alpha_beta(mesh);
    case 2:
      return slow_first_axis(mesh);
    default: {
      AlphaBeta model = default_alpha_beta(mesh);
      for (auto& axis : model.axes) {
        for (LinkCost* link : {&axis.all_gather, &axis.reduce_scatter, &axis.all_reduce, &axis.all_to_all,
                               &axis.permute, &model.copy}) {
          *link = {static_cast<double>(bytes.below(20)), static_cast<double>(bytes.below(20)) / 10000};
        }
      }
      return model;
    }
  }
}

// A whole tensor of small numbers, positive, negative and zero.
inline Numbers whole_numbers(const std::vector<int64_t>& shape) {
  Numbers whole{shape, {}};
  for (int64_t i = 0; i < num_elements(shape); ++i) {
    whole.values.push_back(kUnit * static_cast<double>(i % 9 - 4));
  }
  return whole;
}

}  // namespace funcol::test
