#include "fsdp/group_gradients.h"

#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include "support/python.h"

namespace funcol::python::group_gradients_test {
namespace {

using test::python;
using Ints = std::vector<int64_t>;

at::Tensor counted(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::arange(1, c10::multiply_integers(sizes) + 1, at::TensorOptions(type)).view(sizes);
}

at::Tensor laid_out(const std::vector<at::Tensor>& gradients, int64_t num_ranks) {
  int64_t length = 0;
  for (const auto& gradient : gradients) {
    length += padded_length(gradient, num_ranks);
  }
  auto buffer = at::full({length}, -1, gradients[0].options());  // no byte may stay as it is
  copy_gradients_in(gradients, buffer, num_ranks);
  return buffer;
}

TEST(PaddedLength, MakesDim0AMultipleOfTheRanks) {
  EXPECT_EQ(padded_length(counted({5, 3}), 2), 18);
  EXPECT_EQ(padded_length(counted({4, 3}), 2), 12);
  EXPECT_EQ(padded_length(counted({1, 3}), 4), 12);
  EXPECT_EQ(padded_length(counted({0, 3}), 4), 0);
}

TEST(CopyGradientsIn, LaysRanksOneAfterAnother) {
  const auto buffer = laid_out({counted({3}), counted({2, 2})}, 2);
  // Rank 0: rows 1 2 of the first, row 1 2 of the second. Rank 1: row 3 and a row of zeros, row 3 4.
  const auto expected = at::tensor({1, 2, 1, 2, 3, 0, 3, 4}, at::kFloat);
  EXPECT_TRUE(at::equal(buffer, expected)) << buffer;
}

TEST(CopyGradientsIn, PadsRanksThatGetNothing) {
  const auto buffer = laid_out({counted({1, 2}), counted({3})}, 4);
  EXPECT_TRUE(at::equal(buffer, at::tensor({1, 2, 1, 0, 0, 2, 0, 0, 3, 0, 0, 0}, at::kFloat))) << buffer;
}

TEST(CopyGradientsIn, LaysOutWhatPyTorchDoes) {
  for (const auto num_ranks : {1, 2, 3, 4, 7}) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const std::vector<at::Tensor> gradients{counted({5, 3}, type), counted({8}, type),
                                              counted({1, 2, 2}, type)};
      const auto expected = at::_chunk_cat(gradients, /*dim=*/0, num_ranks).flatten();
      EXPECT_TRUE(at::equal(laid_out(gradients, num_ranks), expected)) << num_ranks << " ranks, " << type;
    }
  }
}

TEST(CopyGradientsIn, CastsAsPyTorchDoes) {
  const auto types = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
  for (const auto from : types) {
    for (const auto to : types) {
      const auto gradient = counted({1025, 3}, at::kDouble).div(7).to(from);  // rounded
      const auto buffer = at::full({padded_length(gradient, 2)}, -1, to);
      copy_gradients_in({gradient}, buffer, 2);
      const auto expected = at::_chunk_cat({gradient.to(to)}, /*dim=*/0, 2).flatten();
      EXPECT_TRUE(at::equal(buffer, expected)) << from << " to " << to;
    }
  }
}

TEST(PlainGradients, AreFloatsOrOfOneTypeInOneMemory) {
  const auto is_plain = [](const char* list) {
    return plain_gradients(python(list).cast<py::list>(), at::kFloat, 2).has_value();
  };
  EXPECT_TRUE(is_plain("[torch.ones(3, 2), torch.ones(4)]"));
  EXPECT_TRUE(is_plain("[torch.ones(3, 2), torch.ones(4, dtype=torch.bfloat16)]"));
  EXPECT_FALSE(is_plain("[torch.ones(3, 2), torch.ones(4, dtype=torch.int32)]")) << "mixed types";
  EXPECT_FALSE(is_plain("[torch.ones(3, 2).t()]")) << "not contiguous";
  EXPECT_FALSE(is_plain("[torch.ones(())]")) << "no dim to cut";
  EXPECT_FALSE(is_plain("[torch.ones(2, device='meta')]")) << "no memory";
  EXPECT_FALSE(is_plain("[dtensor(line, [Replicate()], torch.ones(2), 2)]")) << "a subclass";
}

TEST(CopiedGradients, LeavesTheRestToPyTorch) {
  const auto buffer = python("torch.zeros(6)");
  EXPECT_TRUE(fsdp_reduce_copy_in(python("[torch.ones(5)]"), buffer, 2));
  EXPECT_EQ(python("x.tolist()", buffer).cast<std::vector<double>>(),
            (std::vector<double>{1, 1, 1, 1, 1, 0}));
  EXPECT_FALSE(fsdp_reduce_copy_in(python("[torch.ones(5, dtype=torch.int64)]"), buffer, 2))
      << "another type";
  EXPECT_FALSE(fsdp_reduce_copy_in(python("[torch.ones(7)]"), buffer, 2)) << "another length";
  EXPECT_FALSE(fsdp_reduce_copy_in(python("(torch.ones(5),)"), buffer, 2)) << "no list";
}

}  // namespace
}  // namespace funcol::python::group_gradients_test
