#include "fsdp/gather.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "fsdp/param_group_view.h"
#include "support/python.h"

namespace funcol::python::gather_test {
namespace {

using test::python;

at::Tensor counted(int64_t count, at::ScalarType type = at::kFloat) {
  return at::arange(1, count + 1, at::TensorOptions(type));
}

Shards shards_of(std::vector<at::Tensor> tensors, at::ScalarType type = at::kFloat) {
  Shards shards{.tensors = std::move(tensors), .dtype = type};
  for (const auto& tensor : shards.tensors) {
    shards.types.push_back(type);
    shards.lengths.push_back(tensor.numel());
    shards.length += tensor.numel();
  }
  return shards;
}

TEST(CopyIn, LaysShardsIntoThisRanksPart) {
  const auto output = at::full({9}, -1, at::kFloat);
  const auto sent = copy_in(shards_of({counted(2), counted(1)}), output, /*rank=*/1);
  EXPECT_TRUE(at::equal(sent, at::tensor({1, 2, 1}, at::kFloat)));
  EXPECT_TRUE(at::equal(output, at::tensor({-1, -1, -1, 1, 2, 1, -1, -1, -1}, at::kFloat))) << output;
}

TEST(CopyIn, TakesAnEmptyShard) {
  const auto output = at::full({4}, -1, at::kFloat);
  copy_in(shards_of({counted(0), counted(2)}), output, /*rank=*/0);
  EXPECT_TRUE(at::equal(output, at::tensor({1, 2, -1, -1}, at::kFloat))) << output;
}

TEST(CopyIn, CastsToTheTypeOfTheGather) {
  const auto output = at::full({6}, -1, at::kBFloat16);
  copy_in(shards_of({counted(2), counted(1, at::kDouble)}, at::kBFloat16), output, /*rank=*/1);
  EXPECT_TRUE(at::equal(output, at::tensor({-1, -1, -1, 1, 2, 1}, at::kFloat).to(at::kBFloat16))) << output;
}

TEST(CopyIn, LaysOutShardsOfSeveralTypesAsBytes) {
  for (const int64_t scale : {int64_t{1}, int64_t{1} << 18}) {  // the larger copies are ATen's
    const auto output = at::full({12 * scale}, 0xA5, at::kByte);
    const Shards shards{.tensors = {counted(scale), counted(scale, at::kDouble)},
                        .types = {at::kFloat, at::kBFloat16},
                        .lengths = {4 * scale, 2 * scale},
                        .length = 6 * scale};
    const auto sent = copy_in(shards, output, /*rank=*/1);
    EXPECT_EQ(sent.storage_offset(), 6 * scale);
    EXPECT_TRUE(at::equal(sent.narrow(0, 0, 4 * scale), counted(scale).view(at::kByte)));
    EXPECT_TRUE(
        at::equal(sent.narrow(0, 4 * scale, 2 * scale), counted(scale).to(at::kBFloat16).view(at::kByte)));
    EXPECT_TRUE(output.narrow(0, 0, 6 * scale).eq(0xA5).all().item<bool>());
  }
}

class CopyOut : public ::testing::Test {
 protected:
  CopyOut() {
    auto& known = fully_shard();
    known.param = reinterpret_cast<PyTypeObject*>(python("Param").ptr());
    known.methods.at(ReplacedFunction("_default_all_gather_output_fn").index).of_param = {
        PyUnicode_InternFromString("alloc_all_gather_outputs")};
  }
};

class CopyOutOfSize : public CopyOut, public ::testing::WithParamInterface<int64_t> {};

// Two parameters of 2 and 1 times so many elements a rank, over 3 ranks; the largest copies are ATen's.
TEST_P(CopyOutOfSize, CutsTheBufferIntoParameters) {
  const auto scale = GetParam();
  const auto params = python("[Param(), Param()]");
  const auto buffer = counted(9 * scale);
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(buffer));
  const auto lengths = python("[[2 * x], [x]]", py::int_(scale));
  ASSERT_TRUE(fsdp_copy_out(params, object, python("[[torch.float32], [torch.float32]]"), lengths, 3));
  const auto first = python("x[0].all_gather_outputs[0]", params).cast<at::Tensor>();
  const auto second = python("x[1].all_gather_outputs[0]", params).cast<at::Tensor>();
  const auto rows = buffer.view({3, 3 * scale});
  EXPECT_TRUE(at::equal(first, rows.slice(1, 0, 2 * scale).flatten()));
  EXPECT_TRUE(at::equal(second, rows.slice(1, 2 * scale).flatten()));
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, CopyOutOfSize, ::testing::Values(1, 7, 1 << 16));

TEST_F(CopyOut, FillsTensorsThatAreThere) {
  const auto params = python("[Param(all_gather_outputs=[torch.zeros(4)])]");
  const auto before = python("x[0].all_gather_outputs[0]", params);
  const auto buffer = python("torch.arange(4.0)");
  ASSERT_TRUE(fsdp_copy_out(params, buffer, python("[[torch.float32]]"), python("[[2]]"), 2));
  EXPECT_TRUE(python("x[0].all_gather_outputs[0]", params).is(before));
  EXPECT_TRUE(at::equal(before.cast<at::Tensor>(), buffer.cast<at::Tensor>()));
}

TEST_F(CopyOut, LeavesTheRestToPyTorch) {
  const auto copies = [](const char* param, const char* types, const char* lengths) {
    const auto params = python(param);
    return static_cast<bool>(
        fsdp_copy_out(params, python("torch.arange(4.0)"), python(types), python(lengths), 2));
  };
  EXPECT_TRUE(copies("[Param()]", "[[torch.float32]]", "[[2]]"));
  EXPECT_FALSE(copies("[Param()]", "[[torch.bfloat16]]", "[[2]]")) << "gathered as bytes";
  EXPECT_FALSE(copies("[Param()]", "[[torch.float32]]", "[[1]]")) << "another length";
  EXPECT_FALSE(copies("[Param()]", "[[torch.float32]]", "[[1, 1]]")) << "several inputs";
  EXPECT_FALSE(copies("[Param(dim=1)]", "[[torch.float32]]", "[[2]]")) << "cut along another dim";
  EXPECT_FALSE(copies("[Param(alloc_all_gather_outputs=None)]", "[[torch.float32]]", "[[2]]"))
      << "a method of its own";
  EXPECT_FALSE(copies("[object()]", "[[torch.float32]]", "[[2]]")) << "another class";
}

}  // namespace
}  // namespace funcol::python::gather_test
