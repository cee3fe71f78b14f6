// Shape, strides and dtype of a full tensor: PyTorch's TensorMeta as a value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace funcol {

// PyTorch's torch.dtype, with the numbers of c10::ScalarType.
enum class Dtype : int8_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kComplex32 = 8,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kBFloat16 = 15,
  kFloat8E5M2 = 23,
  kFloat8E4M3 = 24,
  kFloat8E5M2Fnuz = 25,
  kFloat8E4M3Fnuz = 26,
  kUInt16 = 27,
  kUInt32 = 28,
  kUInt64 = 29,
  kFloat8E8M0 = 44,
};

bool is_floating_point(Dtype dtype);
bool is_complex(Dtype dtype);
// Returns true for an integral or an unsigned dtype. kBool counts as both.
bool is_integral(Dtype dtype);
bool is_unsigned(Dtype dtype);
// Returns the bytes of an element. Throws std::invalid_argument for a number that Dtype does not list.
int64_t itemsize(Dtype dtype);
// Returns the dtype as PyTorch prints it in specs: "f32", "bf16", "i64", "b8".
std::string_view to_string(Dtype dtype);

int64_t num_elements(const std::vector<int64_t>& shape);
// Returns the strides of a contiguous tensor, in elements. Dims of size 0 count as 1, as in PyTorch.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape);

struct TensorMeta {
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;  // in elements
  Dtype dtype = Dtype::kFloat32;

  int64_t num_dims() const { return static_cast<int64_t>(shape.size()); }

  friend bool operator==(const TensorMeta&, const TensorMeta&) = default;
};

// Returns dtype and shape: "f32[8, 4]".
std::string to_string(const TensorMeta& meta);

}  // namespace funcol
