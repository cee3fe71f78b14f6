#include <algorithm>
#include <initializer_list>

#include "propagation/rule.h"

namespace funcol {
namespace {

using Names = std::initializer_list<std::string_view>;

constexpr LocalSizeArgs with_shape(std::string_view argument) { return {.shape = argument, .stride = {}}; }

bool contains(Names names, std::string_view name) { return std::ranges::find(names, name) != names.end(); }

}  // namespace

std::optional<LocalSizeArgs> local_size_args(std::string_view op) {
  const auto name = without_overload(op);
  // The overload view.dtype has no size argument.
  if (op == "aten::view" ||
      contains({"aten::_reshape_copy", "aten::_unsafe_view", "aten::expand", "aten::expand_copy",
                "aten::new_empty", "aten::new_full", "aten::new_ones", "aten::new_zeros", "aten::view_copy"},
               name)) {
    return with_shape("size");
  }
  if (name == "aten::reshape") {
    return with_shape("shape");
  }
  if (contains({"aten::select_backward", "aten::slice_backward"}, name)) {
    return with_shape("input_sizes");
  }
  if ((name.starts_with("aten::upsample_") || name.starts_with("aten::_upsample_")) &&
      name.ends_with("_backward")) {
    return with_shape("input_size");
  }
  if (name == "aten::new_empty_strided") {
    return LocalSizeArgs{.shape = "size", .stride = "stride"};
  }
  if (contains({"aten::native_group_norm", "aten::native_group_norm_backward"}, name)) {
    return LocalSizeArgs{.shape = {}, .stride = {}, .batch_channels_pixels = true};
  }
  if (contains({"aten::squeeze", "aten::squeeze_", "aten::squeeze_copy"}, name)) {
    return LocalSizeArgs{.shape = {}, .stride = {}, .squeezed_dims = true};
  }
  return std::nullopt;
}

}  // namespace funcol
