#include "dispatch/strides.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include "support/python.h"

namespace funcol::python::strides_test {
namespace {

using Ints = std::vector<int64_t>;

const Mesh kLine{{2}, {}, {}, 1};
const std::vector<Placement> kRows{Placement::shard(0)};

TEST(StrideOfWhole, OfADenseLocalIsDense) {
  EXPECT_EQ(full_strides(at::empty({3, 4}), kRows, {5, 4}, kLine), (Ints{4, 1}));
}

TEST(StrideOfWhole, KeepsTheOrderOfDims) {
  EXPECT_EQ(full_strides(at::empty({4, 3}).t(), kRows, {5, 4}, kLine), (Ints{1, 5}));
}

TEST(StrideOfWhole, SpreadsWhatIsNotDense) {
  const auto local = at::empty({3, 8}).slice(1, 0, 4);
  EXPECT_EQ(full_strides(local, kRows, {6, 4}, kLine), (Ints{8, 1}));
  EXPECT_EQ(full_strides(local, {Placement::shard(1)}, {3, 8}, kLine), (Ints{16, 1}));
}

TEST(StrideOfWhole, OfAnEmptyLocalCountsItAsOne) {
  EXPECT_EQ(full_strides(at::empty({0, 4}), kRows, {0, 4}, kLine), (Ints{4, 1}));
}

// A local tensor and its placement on two ranks, whose sizes are even.
class EvenLocal : public ::testing::TestWithParam<const char*> {};

TEST_P(EvenLocal, HasTheStridesThatPyTorchGivesTheWhole) {
  const auto local = test::python(GetParam());
  const auto& tensor = local.cast<at::Tensor>();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    auto shape = tensor.sizes().vec();
    shape[dim] *= 4;
    const auto expected =
        test::python("compute_global_tensor_info(x[0], line, [Shard(x[1])])[1]", py::make_tuple(local, dim));
    EXPECT_EQ(full_strides(tensor, {Placement::shard(dim)}, shape, {{4}, {}, {}, 1}), expected.cast<Ints>())
        << "dim " << dim;
  }
}

INSTANTIATE_TEST_SUITE_P(StrideOfWhole, EvenLocal,
                         ::testing::Values("torch.empty(3, 4)", "torch.empty(4, 3).t()",
                                           "torch.empty(1, 4, 1)", "torch.empty(2, 3, 4).permute(1, 2, 0)",
                                           "torch.empty(6)"));

}  // namespace
}  // namespace funcol::python::strides_test
