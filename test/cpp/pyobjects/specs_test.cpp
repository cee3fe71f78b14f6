#include "pyobjects/specs.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>

#include "layout/tables.h"
#include "pyobjects/attributes.h"
#include "pyobjects/op_schemas.h"
#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::specs_test {
namespace {

using test::num_calls;
using test::python;
using test::refuses;

Layout layout(std::vector<Placement> placements) {
  auto order = default_shard_order(placements);
  return {std::move(placements), std::move(order)};
}

py::object made(const Spec& spec) {
  return to_python_spec(spec, python("grid"), /*strided_as_order=*/false, nullptr);
}

TEST(ReadInts, RefusesSymbolsAndIntsBeyond64Bits) {
  std::vector<int64_t> numbers;
  EXPECT_TRUE(read_ints(python("(3, -2**63)"), numbers));
  EXPECT_EQ(numbers, (std::vector<int64_t>{3, std::numeric_limits<int64_t>::min()}));
  EXPECT_FALSE(read_ints(python("(3, 2**63)"), numbers));
  EXPECT_EQ(PyErr_Occurred(), nullptr);
  EXPECT_FALSE(read_ints(python("(3, 'a')"), numbers));
  EXPECT_FALSE(read_ints(python("[3]"), numbers));
}

TEST(ReadSpec, ReadsTheTensorAndItsLayout) {
  const auto spec = read_spec(python("spec(grid, [Shard(1), Partial('max')], 5, 3, dtype=torch.bfloat16)"));
  EXPECT_EQ(spec.meta, (TensorMeta{{5, 3}, {3, 1}, Dtype::kBFloat16}));
  EXPECT_EQ(spec.layout, layout({Placement::shard(1), Placement::partial(PartialOp::kMax)}));
}

TEST(ReadSpec, ReadsStridesAndOrdersAsTheyAre) {
  const auto spec =
      read_spec(python("spec(grid, [Shard(0), Shard(0)], 8, 4, stride=(1, 8), order=[(0, (1, 0))])"));
  EXPECT_EQ(spec.meta.stride, (std::vector<int64_t>{1, 8}));
  EXPECT_EQ(spec.layout.order, (ShardOrder{{1, 0}}));
}

TEST(ReadSpec, RefusesASpecWithoutATensor) {
  EXPECT_TRUE(
      refuses<c10::ValueError>([] { read_spec(python("DTensorSpec(line, (Shard(0),))")); }, {"tensor_meta"}));
}

TEST(ReadSpec, RefusesASymbolicSize) {
  EXPECT_TRUE(refuses<c10::NotImplementedError>(
      [] { read_spec(python("symbolic(spec(line, [Shard(0)], 8))")); }, {"symbolic size"}));
}

TEST(ReadSpec, RefusesOtherObjects) {
  EXPECT_TRUE(refuses<c10::TypeError>([] { read_spec(python("torch.ones(2)")); }, {"Tensor", "DTensorSpec"}));
}

TEST(ToPythonSpec, MakesWhatItReads) {
  const std::vector<Spec> specs = {
      {{{5, 3}, {3, 1}, Dtype::kFloat32}, layout({Placement::shard(0), Placement::replicate()})},
      {{{8, 4}, {1, 8}, Dtype::kInt64}, {{Placement::shard(0), Placement::shard(0)}, {{1, 0}}}},
      {{{}, {}, Dtype::kBool}, layout({Placement::partial(PartialOp::kMin), Placement::replicate()})},
      {{{8}, {1}, Dtype::kFloat16}, layout({Placement::shard(0, 2), Placement::shard(0)})},
  };
  for (const auto& spec : specs) {
    EXPECT_EQ(read_spec(made(spec)), spec) << to_string(spec);
  }
}

TEST(ToPythonSpec, EqualsTheSpecOfPyTorch) {
  const auto spec =
      made({{{5, 3}, {3, 1}, Dtype::kFloat32}, layout({Placement::shard(1), Placement::partial()})});
  EXPECT_TRUE(spec.equal(python("spec(grid, [Shard(1), Partial()], 5, 3)")));
  EXPECT_FALSE(spec.equal(python("spec(grid, [Partial(), Shard(1)], 5, 3)")));
}

TEST(ToPythonSpec, GivesNormsTheirOrder) {
  const Spec spec{{{}, {}, Dtype::kFloat32},
                  layout({Placement::norm_partial({2, true}), Placement::norm_partial({2, true})})};
  EXPECT_EQ(python("repr(x.placements[0].norm_type)", made(spec)).cast<std::string>(), "2");
}

TEST(ToPythonSpec, IsMadeOnce) {
  const Spec spec{{{7, 2}, {2, 1}, Dtype::kFloat32}, layout({Placement::shard(0), Placement::shard(1)})};
  const auto before = num_calls("make_spec");
  const auto first = made(spec);
  const auto second = made(spec);
  EXPECT_EQ(num_calls("make_spec"), before + 1);
  EXPECT_TRUE(first.equal(second));
  clear_tables();
  EXPECT_EQ(read_spec(made(spec)), spec);
  EXPECT_EQ(num_calls("make_spec"), before + 1) << "its layout is known";
}

TEST(ToPythonSpec, IsTheCallersOwn) {
  const Spec spec{{{6, 2}, {2, 1}, Dtype::kFloat32}, layout({Placement::shard(0), Placement::replicate()})};
  auto first = made(spec);
  first.attr("tensor_meta") = py::none();
  EXPECT_EQ(read_spec(made(spec)), spec);
}

TEST(ToPythonSpec, IsOnTheMeshThatWasAskedFor) {
  const Spec spec{{{6, 2}, {2, 1}, Dtype::kFloat32}, layout({Placement::shard(0), Placement::replicate()})};
  const auto mesh = python("new_grid()");
  made(spec);
  EXPECT_TRUE(attribute<"mesh">(to_python_spec(spec, mesh, false, nullptr)).is(mesh));
  EXPECT_TRUE(attribute<"mesh">(made(spec)).is(python("grid")));
}

TEST(ToPythonSpec, AsksForMasksEachTime) {
  const Spec spec{{{6, 2}, {2, 1}, Dtype::kFloat32},
                  layout({Placement::partial(PartialOp::kSum, 7), Placement::replicate()})};
  for (const char* const mask : {"Partial('min')", "Partial('max')"}) {
    const auto placement = python(mask);
    const auto of_mask = [&](const Placement& asked) {
      EXPECT_EQ(asked.mask, 7);
      return placement;
    };
    const auto result = to_python_spec(spec, python("grid"), false, of_mask);
    EXPECT_TRUE(python("x.placements[0]", result).is(placement));
  }
}

TEST(CopySpec, EqualsButIsAnother) {
  const auto spec = python("spec(grid, [Shard(0), Replicate()], 5, 3)");
  auto copy = copy_spec(spec);
  EXPECT_TRUE(copy.equal(spec));
  copy.attr("placements") = python("(Replicate(), Replicate())");
  EXPECT_TRUE(spec.equal(python("spec(grid, [Shard(0), Replicate()], 5, 3)")));
}

TEST(CopySpec, GoesOntoAMeshAndOff) {
  const auto spec = python("spec(grid, [Shard(0), Replicate()], 5, 3)");
  const auto without = copy_without_mesh(spec);
  EXPECT_TRUE(without.attr("mesh").is_none());
  const auto mesh = python("new_grid()");
  EXPECT_TRUE(attribute<"mesh">(copy_onto(without, mesh)).is(mesh));
  EXPECT_TRUE(attribute<"mesh">(spec).is(python("grid")));
}

TEST(IdOfSpec, IsUniqueHoweverTheSpecWasMade) {
  std::set<uint64_t> ids;
  for (int64_t rows = 1; rows <= 20; ++rows) {
    const Spec value{{{rows, 7}, {7, 1}, Dtype::kFloat32},
                     layout({Placement::shard(0), Placement::shard(1)})};
    ids.insert(id_of_spec(made(value).ptr()));
    const auto other = "spec(grid, [Shard(0), Shard(1)], 7, " + std::to_string(rows) + ")";
    ids.insert(id_of_spec(python(other.c_str()).ptr()));
  }
  EXPECT_EQ(ids.size(), 39) << "one shape, 7 x 7, came both ways";
  EXPECT_EQ(ids.count(0), 0);
}

TEST(CanonicalSpec, StandsForAllThatAreEqual) {
  const auto spec = python("spec(grid, [Shard(0), Replicate()], 5, 3)");
  const auto canonical = canonical_spec(spec);
  EXPECT_TRUE(canonical.attr("mesh").is_none());
  EXPECT_TRUE(copy_onto(canonical, python("grid")).equal(spec));
  EXPECT_FALSE(canonical.is(spec)) << "programs write to specs";
  EXPECT_TRUE(canonical.is(canonical_spec(python("spec(grid, [Shard(0), Replicate()], 5, 3)"))));
}

TEST(CanonicalSpec, TellsOthersApart) {
  const auto canonical = canonical_spec(python("spec(grid, [Shard(0), Replicate()], 4, 4)"));
  for (const char* const other : {
           "spec(grid, [Shard(1), Replicate()], 4, 4)",
           "spec(grid, [Shard(0), Replicate()], 4, 5)",
           "spec(grid, [Shard(0), Replicate()], 4, 4, stride=(1, 4))",
           "spec(grid, [Shard(0), Replicate()], 4, 4, dtype=torch.int32)",
           "spec(line, [Shard(0)], 4, 4)",
       }) {
    EXPECT_FALSE(canonical.is(canonical_spec(python(other)))) << other;
  }
}

TEST(CanonicalSpec, RefusesMasks) {
  EXPECT_TRUE(refuses<c10::NotImplementedError>(
      [] {
        canonical_spec(python("spec(line, [_MaskPartial(offset_shape=torch.Size([8]), offset_dim=0)], 8)"));
      },
      {"without values"}));
}

TEST(SpecObjects, HoldAlikeWherePlacementsAndOrdersAgree) {
  const auto spec = python("spec(grid, [Shard(0), Shard(0)], 8, 4)");
  EXPECT_TRUE(have_same_layout(spec, python("spec(grid, [Shard(0), Shard(0)], 9, 4)")));
  EXPECT_FALSE(have_same_layout(spec, python("spec(grid, [Shard(0), Shard(1)], 8, 4)")));
  EXPECT_FALSE(have_same_layout(spec, python("spec(grid, [Shard(0), Shard(0)], 8, 4, order=[(0, (1, 0))])")));
}

TEST(SpecObjects, HoldAlikePlacementsWithRulesOfTheirOwn) {
  EXPECT_TRUE(
      have_same_layout(python("spec(line, [OwnPartial()], 8)"), python("spec(line, [OwnPartial()], 8)")));
  EXPECT_FALSE(
      have_same_layout(python("spec(line, [OwnPartial()], 8)"), python("spec(line, [Shard(0)], 8)")));
}

TEST(SpecObjects, GiveTheShapeOfTheWhole) {
  EXPECT_EQ(shape_of(python("spec(line, [Shard(0)], 5, 3)"), "test"), (std::vector<int64_t>{5, 3}));
  EXPECT_TRUE(refuses<c10::ValueError>([] { shape_of(python("DTensorSpec(line, (Shard(0),))"), "test"); },
                                       {"funcol::test", "no tensor_meta"}));
}

}  // namespace
}  // namespace funcol::python::specs_test
