#include "pyobjects/op_schemas.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "pyobjects/layouts.h"
#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::op_schemas_test {
namespace {

using test::python;
using test::refuses;

PythonSchema read(const char* schema, bool moves_keywords = false) {
  return read_op_schema(python(schema), moves_keywords);
}

Layout layout(std::vector<Placement> placements) {
  auto order = default_shard_order(placements);
  return {std::move(placements), std::move(order)};
}

TEST(ToOperator, KnowsWhatIsWrittenAndReturned) {
  const auto& in_place = to_operator(python("aten.add_.Tensor"));
  EXPECT_EQ(in_place.name, "aten::add_.Tensor");
  EXPECT_EQ(in_place.is_written, (std::vector<bool>{true, false, false}));
  EXPECT_EQ(in_place.returned, std::vector<std::optional<size_t>>{0});
  const auto& functional = to_operator(python("aten.mm.default"));
  EXPECT_EQ(functional.name, "aten::mm");
  EXPECT_EQ(functional.is_written, (std::vector<bool>{false, false}));
  EXPECT_EQ(functional.returned, std::vector<std::optional<size_t>>{std::nullopt});
}

TEST(ToOperator, TakesNoOutArgumentForWritten) {
  EXPECT_EQ(to_operator(python("aten.neg.out")).is_written, (std::vector<bool>{false, false}));
}

TEST(ToOperator, KnowsThatBatchNormUpdatesItsStatistics) {
  const auto& op = to_operator(python("aten.native_batch_norm.default"));
  EXPECT_EQ(op.is_written, (std::vector<bool>{false, false, false, true, true, false, false, false}));
}

TEST(ReadOpSchema, ReadsTensorsAndDefaults) {
  const auto schema = read(
      "OpSchema(aten.add.Tensor, (spec(grid, [Shard(0), Replicate()], 4, 2), spec(grid, [Shard(1), "
      "Partial()], 4, 2)), {})");
  EXPECT_EQ(schema.call.op, "aten::add.Tensor");
  EXPECT_EQ(schema.call.arg("self").tensor(), 0);
  EXPECT_EQ(schema.call.arg("other").tensor(), 1);
  EXPECT_EQ(schema.call.arg("alpha").integer(), 1);
  EXPECT_EQ(schema.call.tensors, std::vector<TensorMeta>(2, {{4, 2}, {2, 1}, Dtype::kFloat32}));
  EXPECT_EQ(schema.layouts, (std::vector<Layout>{layout({Placement::shard(0), Placement::replicate()}),
                                                 layout({Placement::shard(1), Placement::partial()})}));
  EXPECT_EQ(schema.is_pinned, (std::vector<bool>{false, false}));
  EXPECT_TRUE(schema.mesh.is(python("grid")));
}

TEST(ReadOpSchema, ReadsNumbersAndLists) {
  const auto sum = read("OpSchema(aten.sum.dim_IntList, (spec(line, [Shard(0)], 8, 4), [-1], True), {})");
  EXPECT_EQ(sum.call.arg("dim").integers(), std::vector<int64_t>{-1});
  EXPECT_TRUE(sum.call.arg("keepdim").boolean());
  EXPECT_TRUE(sum.call.arg("dtype").is_none());
  const auto mul = read("OpSchema(aten.mul.Scalar, (spec(line, [Shard(0)], 8), 0.5), {})");
  EXPECT_EQ(mul.call.arg("other").number(), 0.5);
}

TEST(ReadOpSchema, RefusesIntsBeyond64Bits) {
  for (const auto* number : {"2**63", "-2**63 - 1"}) {
    const auto schema =
        std::string("OpSchema(aten.mul.Scalar, (spec(line, [Shard(0)], 8), ") + number + "), {})";
    EXPECT_TRUE(refuses<c10::NotImplementedError>([&] { read(schema.c_str()); }, {"aten::mul", "64 bits"}));
  }
  const auto largest = read("OpSchema(aten.mul.Scalar, (spec(line, [Shard(0)], 8), 2**63 - 1), {})");
  EXPECT_EQ(largest.call.arg("other").integer(), std::numeric_limits<int64_t>::max());
}

TEST(ReadOpSchema, ReadsDtypesFormatsAndDevices) {
  const auto schema = read(
      "OpSchema(aten.clone.default, (spec(line, [Shard(0)], 8),), {'memory_format': "
      "torch.preserve_format})");
  EXPECT_EQ(schema.call.arg("memory_format").integer(), static_cast<int64_t>(at::MemoryFormat::Preserve));
  const auto copy = read(
      "OpSchema(aten._to_copy.default, (spec(line, [Shard(0)], 8),), {'dtype': torch.float16, 'device': "
      "torch.device('cpu')})");
  EXPECT_EQ(copy.call.arg("dtype").value, Argument{Dtype::kFloat16}.value);
  EXPECT_EQ(copy.call.arg("device").value, Argument{std::string("cpu")}.value);
}

TEST(ReadOpSchema, OfAnInPlaceOperatorHasItsResult) {
  const auto schema =
      read("OpSchema(aten.add_.Tensor, (spec(line, [Shard(0)], 8), spec(line, [Replicate()], 8)), {})");
  EXPECT_EQ(schema.is_pinned, (std::vector<bool>{true, false}));
  ASSERT_EQ(schema.results.size(), 1);
  EXPECT_EQ(schema.results[0], layout({Placement::shard(0)}));
}

TEST(ReadOpSchema, OfOutHasItsResult) {
  const auto schema =
      read("OpSchema(aten.neg.out, (spec(line, [Replicate()], 8),), {'out': spec(line, [Shard(0)], 8)})");
  EXPECT_EQ(schema.call.tensors.size(), 1);
  EXPECT_FALSE(schema.call.has_arg("out"));
  ASSERT_EQ(schema.results.size(), 1);
  EXPECT_EQ(schema.results[0], layout({Placement::shard(0)}));
}

TEST(ReadOpSchema, KeepsKeywordTensorsWhereTheyAre) {
  const auto* const schema =
      "OpSchema(aten.searchsorted.Tensor, (spec(line, [Replicate()], 8), spec(line, [Shard(0)], 4)), "
      "{'sorter': spec(line, [Replicate()], 8, dtype=torch.int64)})";
  EXPECT_EQ(read(schema).is_pinned, (std::vector<bool>{false, false, true}));
  EXPECT_EQ(read(schema, /*moves_keywords=*/true).is_pinned, (std::vector<bool>{false, false, false}));
}

TEST(ReadOpSchema, FreesGradientsThatAFusedOptimizerOnlyReads) {
  const auto of = [](const char* scale) {
    return read_op_schema(python("fused_sgd(x)", python(scale)), /*moves_keywords=*/true).is_pinned;
  };
  EXPECT_EQ(of("None"), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(of("spec(line, [Replicate()])"), (std::vector<bool>{true, true, true, false}));
}

TEST(ReadOpSchema, RefusesWhatHasNoValue) {
  EXPECT_TRUE(refuses<c10::NotImplementedError>(
      [] { read("OpSchema(aten.mul.Scalar, (spec(line, [Shard(0)], 8), 1j), {})"); }, {"complex"}));
  EXPECT_TRUE(refuses<c10::ValueError>([] { read("OpSchema(aten.ones.default, ([8],), {})"); },
                                       {"aten::ones", "no tensor of a mesh"}));
  EXPECT_TRUE(refuses<c10::TypeError>(
      [] { read("OpSchema(aten.neg.default, (spec(line, [Shard(0)], 8), 1), {})"); }, {"got 2 arguments"}));
}

constexpr auto* kTwoMeshes =
    "OpSchema(aten._foreach_add.List, ([spec(line, [Shard(0)], 8), spec(grid, [Shard(0), Replicate()], 4)], "
    "[spec(line, [Replicate()], 8), spec(line, [Replicate()], 4)]), {})";

TEST(PartsOf, IsOneForMostOperators) {
  const auto schema =
      read("OpSchema(aten.cat.default, ([spec(line, [Shard(0)], 8), spec(line, [Replicate()], 4)],), {})");
  const auto parts = sub_schemas_of(schema);
  ASSERT_EQ(parts.size(), 1);
  EXPECT_EQ(parts[0].tensors, (std::vector<size_t>{0, 1}));
  EXPECT_EQ(parts[0].schema.call.args, schema.call.args);
  EXPECT_EQ(parts[0].schema.layouts, schema.layouts);
}

TEST(PartsOf, IsOneForEachElement) {
  const auto parts = sub_schemas_of(read(kTwoMeshes));
  ASSERT_EQ(parts.size(), 2);
  EXPECT_EQ(parts[0].tensors, (std::vector<size_t>{0, 2}));
  EXPECT_EQ(parts[1].tensors, (std::vector<size_t>{1, 3}));
  EXPECT_EQ(parts[1].schema.call.arg("self").tensor(), 0);
  EXPECT_EQ(parts[1].schema.call.arg("other").tensor(), 1);
  EXPECT_EQ(parts[0].schema.mesh, to_mesh(python("line")));
  EXPECT_EQ(parts[1].schema.mesh, to_mesh(python("grid")));
}

TEST(PartsOf, TakesAReplicateOfAnotherMesh) {
  EXPECT_EQ(sub_schemas_of(read(kTwoMeshes))[1].schema.layouts[1],
            layout({Placement::replicate(), Placement::replicate()}));
}

TEST(PartsOf, RefusesTwoMeshes) {
  const auto schema = read(
      "OpSchema(aten.add.Tensor, (spec(line, [Shard(0)], 8), spec(grid, [Shard(0), Replicate()], 8)), {})");
  EXPECT_TRUE(refuses<c10::ValueError>([&] { sub_schemas_of(schema); }, {"aten::add.Tensor", "two meshes"}));
}

}  // namespace
}  // namespace funcol::python::op_schemas_test
