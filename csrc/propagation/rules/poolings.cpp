// Pooling, upsampling and sampling on grids of images, [batch, channels, *places] or [channels, *places].
// Images and channels are independent.
#include "propagation/rules/row_list.h"
#include "propagation/rules/rule_table.h"

namespace funcol::pooling_rules {
namespace {

bool has_batch(const OpCall& call, int64_t num_places) {
  return call.tensors.at(0).num_dims() >= num_places + 2;
}

// Returns true if every rank has a channel, which is dim `dim`. Batches may be empty.
template <int64_t dim>
bool has_channels(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  return leaves_none_empty(composition.inputs[0], mesh, dim, call.tensors[0].shape[dim]);
}

// Returns rows that shard batch and channels, the first dims of all tensors.
Rows by_image_and_channel(const OpCall& call, int64_t num_places, std::string_view linear_in) {
  RowList rows(call);
  rows.add_same_placement(any_shard(0));
  if (has_batch(call, num_places)) {
    rows.add_same_placement(any_shard(1));
  }
  if (!linear_in.empty()) {
    rows.add_arithmetic_partials(kLinearOps, {linear_in});
  }
  return rows.allowing_empty_shards(has_batch(call, num_places) ? has_channels<1> : has_channels<0>);
}

Rule pooling(int64_t num_places, std::string_view linear_in = {}) {
  return [num_places, linear_in](const OpCall& call) {
    return by_image_and_channel(call, num_places, linear_in);
  };
}

// Returns a rule without rows for an image without a batch, whose random numbers still have a batch of one.
Rule fractional_pooling(int64_t num_places) {
  return [num_places](const OpCall& call) {
    return has_batch(call, num_places) ? by_image_and_channel(call, num_places, {}) : Rows{};
  };
}

Rows upsampling(const OpCall& call) {
  RowList rows(call);
  for (const int64_t dim : {0, 1}) {
    rows.add_same_placement(any_shard(dim));
  }
  rows.add_arithmetic_partials(kLinearOps);
  return rows.allowing_empty_shards(has_channels<1>);
}

// Returns a rule that shards the batch alone, since the grid has no channels.
Rule grid_sampling(std::string_view linear_in) {
  return [linear_in](const OpCall& call) {
    RowList rows(call);
    rows.add_same_placement(any_shard(0));
    rows.add_arithmetic_partials(kLinearOps, {linear_in});
    return rows.allowing_empty_shards();
  };
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::avg_pool1d", "aten::adaptive_avg_pool1d"}, pooling(1, "self"));
  table.add_operators({"aten::avg_pool2d", "aten::_adaptive_avg_pool2d"}, pooling(2, "self"));
  table.add_operators({"aten::avg_pool3d", "aten::_adaptive_avg_pool3d"}, pooling(3, "self"));
  table.add_operators({"aten::adaptive_max_pool1d", "aten::max_pool1d_with_indices"}, pooling(1));
  table.add_operators({"aten::adaptive_max_pool2d", "aten::max_pool2d_with_indices", "aten::max_unpool2d"},
                      pooling(2));
  table.add_operators({"aten::adaptive_max_pool3d", "aten::max_pool3d_with_indices", "aten::max_unpool3d"},
                      pooling(3));
  table.add_operators({"aten::fractional_max_pool2d"}, fractional_pooling(2));
  table.add_operators({"aten::fractional_max_pool3d"}, fractional_pooling(3));
  table.add_operators({"aten::_adaptive_avg_pool2d_backward", "aten::avg_pool2d_backward",
                       "aten::max_pool2d_with_indices_backward"},
                      pooling(2, "grad_output"));
  table.add_operators({"aten::_adaptive_avg_pool3d_backward", "aten::avg_pool3d_backward",
                       "aten::max_pool3d_with_indices_backward"},
                      pooling(3, "grad_output"));
  table.add_operators({"aten::_upsample_bicubic2d_aa",    "aten::_upsample_bicubic2d_aa_backward",
                       "aten::_upsample_bilinear2d_aa",   "aten::_upsample_bilinear2d_aa_backward",
                       "aten::_upsample_lanczos2d_aa",    "aten::_upsample_lanczos2d_aa_backward",
                       "aten::_upsample_nearest_exact1d", "aten::_upsample_nearest_exact1d_backward",
                       "aten::_upsample_nearest_exact2d", "aten::_upsample_nearest_exact2d_backward",
                       "aten::_upsample_nearest_exact3d", "aten::_upsample_nearest_exact3d_backward",
                       "aten::upsample_bicubic2d",        "aten::upsample_bicubic2d_backward",
                       "aten::upsample_bilinear2d",       "aten::upsample_bilinear2d_backward",
                       "aten::upsample_linear1d",         "aten::upsample_linear1d_backward",
                       "aten::upsample_nearest1d",        "aten::upsample_nearest1d_backward",
                       "aten::upsample_nearest2d",        "aten::upsample_nearest2d_backward",
                       "aten::upsample_nearest3d",        "aten::upsample_nearest3d_backward",
                       "aten::upsample_trilinear3d",      "aten::upsample_trilinear3d_backward"},
                      upsampling);
  table.add_operators({"aten::grid_sampler_2d", "aten::grid_sampler_3d"}, grid_sampling("input"));
  table.add_operators({"aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward"},
                      grid_sampling("grad_output"));
}

}  // namespace funcol::pooling_rules
