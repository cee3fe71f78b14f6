#include "layout/tensor_meta.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <stdexcept>

namespace funcol {
namespace {

struct DtypeFacts {
  Dtype dtype;
  std::string_view name;
  int64_t itemsize;
};

constexpr std::array<DtypeFacts, 21> kDtypes{{
    {Dtype::kUInt8, "u8", 1},
    {Dtype::kInt8, "i8", 1},
    {Dtype::kInt16, "i16", 2},
    {Dtype::kInt32, "i32", 4},
    {Dtype::kInt64, "i64", 8},
    {Dtype::kFloat16, "f16", 2},
    {Dtype::kFloat32, "f32", 4},
    {Dtype::kFloat64, "f64", 8},
    {Dtype::kComplex32, "c32", 4},
    {Dtype::kComplex64, "c64", 8},
    {Dtype::kComplex128, "c128", 16},
    {Dtype::kBool, "b8", 1},
    {Dtype::kBFloat16, "bf16", 2},
    {Dtype::kFloat8E5M2, "f8e5m2", 1},
    {Dtype::kFloat8E4M3, "f8e4m3fn", 1},
    {Dtype::kFloat8E5M2Fnuz, "f8e5m2fnuz", 1},
    {Dtype::kFloat8E4M3Fnuz, "f8e4m3fnuz", 1},
    {Dtype::kUInt16, "u16", 2},
    {Dtype::kUInt32, "u32", 4},
    {Dtype::kUInt64, "u64", 8},
    {Dtype::kFloat8E8M0, "f8e8m0fnu", 1},
}};

const DtypeFacts& facts(Dtype dtype) {
  for (const auto& known : kDtypes) {
    if (known.dtype == dtype) {
      return known;
    }
  }
  throw std::invalid_argument("Dtype: " + std::to_string(static_cast<int>(dtype)) +
                              " is not the number of a dtype. Use a value that Dtype lists.");
}

}  // namespace

bool is_floating_point(Dtype dtype) { return facts(dtype).name.find('f') != std::string_view::npos; }
bool is_complex(Dtype dtype) { return facts(dtype).name.starts_with('c'); }
int64_t itemsize(Dtype dtype) { return facts(dtype).itemsize; }
std::string_view to_string(Dtype dtype) { return facts(dtype).name; }

int64_t num_elements(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    strides[dim] = step;
    step *= std::max<int64_t>(shape[dim], 1);
  }
  return strides;
}

std::string to_string(const TensorMeta& meta) {
  std::string text(to_string(meta.dtype));
  text += '[';
  for (size_t dim = 0; dim < meta.shape.size(); ++dim) {
    text += (dim == 0 ? "" : ", ") + std::to_string(meta.shape[dim]);
  }
  return text + ']';
}

bool is_integral(Dtype dtype) { return !is_floating_point(dtype) && !is_complex(dtype); }

bool is_unsigned(Dtype dtype) {
  constexpr std::array kUnsigned{Dtype::kBool, Dtype::kUInt8, Dtype::kUInt16, Dtype::kUInt32, Dtype::kUInt64};
  return std::ranges::find(kUnsigned, dtype) != kUnsigned.end();
}

}  // namespace funcol
