#include <algorithm>
#include <array>

#include "propagation/rule.h"

namespace funcol {
namespace {

struct Entry {
  std::string_view op;
  LocalSizeArgs args;
};

constexpr LocalSizeArgs kSize{.shape = "size", .stride = {}};
constexpr LocalSizeArgs kShape{.shape = "shape", .stride = {}};
constexpr LocalSizeArgs kInputSize{.shape = "input_size", .stride = {}};
constexpr LocalSizeArgs kInputSizes{.shape = "input_sizes", .stride = {}};
constexpr LocalSizeArgs kGroupNorm{.shape = {}, .stride = {}, .batch_channels_pixels = true};
constexpr LocalSizeArgs kSqueezed{.shape = {}, .stride = {}, .squeezed_dims = true};

constexpr std::array kEntries{
    Entry{"aten::_unsafe_view", kSize},
    Entry{"aten::_upsample_bicubic2d_aa_backward", kInputSize},
    Entry{"aten::_upsample_bilinear2d_aa_backward", kInputSize},
    Entry{"aten::_upsample_lanczos2d_aa_backward", kInputSize},
    Entry{"aten::_upsample_nearest_exact1d_backward", kInputSize},
    Entry{"aten::_upsample_nearest_exact2d_backward", kInputSize},
    Entry{"aten::_upsample_nearest_exact3d_backward", kInputSize},
    Entry{"aten::_reshape_copy", kSize},
    Entry{"aten::expand", kSize},
    Entry{"aten::expand_copy", kSize},
    Entry{"aten::native_group_norm", kGroupNorm},
    Entry{"aten::native_group_norm_backward", kGroupNorm},
    Entry{"aten::new_empty", kSize},
    Entry{"aten::new_empty_strided", {.shape = "size", .stride = "stride"}},
    Entry{"aten::new_full", kSize},
    Entry{"aten::new_ones", kSize},
    Entry{"aten::new_zeros", kSize},
    Entry{"aten::reshape", kShape},
    Entry{"aten::select_backward", kInputSizes},
    Entry{"aten::slice_backward", kInputSizes},
    Entry{"aten::squeeze", kSqueezed},
    Entry{"aten::squeeze_", kSqueezed},
    Entry{"aten::squeeze_copy", kSqueezed},
    Entry{"aten::upsample_bicubic2d_backward", kInputSize},
    Entry{"aten::upsample_bilinear2d_backward", kInputSize},
    Entry{"aten::upsample_linear1d_backward", kInputSize},
    Entry{"aten::upsample_nearest1d_backward", kInputSize},
    Entry{"aten::upsample_nearest2d_backward", kInputSize},
    Entry{"aten::upsample_nearest3d_backward", kInputSize},
    Entry{"aten::upsample_trilinear3d_backward", kInputSize},
    Entry{"aten::view_copy", kSize},
};

}  // namespace

std::optional<LocalSizeArgs> local_size_args(std::string_view op) {
  // The overload view.dtype has no size argument.
  if (op == "aten::view") {
    return kSize;
  }
  const auto name = without_overload(op);
  const auto* found = std::ranges::find(kEntries, name, &Entry::op);
  return found == kEntries.end() ? std::nullopt : std::optional(found->args);
}

}  // namespace funcol
