#include "dispatch/to_local_from_local.h"

#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include "dispatch/redistribute.h"
#include "layout/tables.h"
#include "support/python.h"

namespace funcol::python::to_local_from_local_test {
namespace {

using test::num_calls;
using test::python;

// A tensor of ten elements, whole on each of four ranks; this one is the last.
py::object whole() { return python("dtensor(line, [Replicate()], torch.arange(10.0), 10)"); }

py::object redistributed(const py::object& dtensor, const char* placements) {
  return redistribute(dtensor, {python(placements)});
}

std::vector<double> local_of(const py::object& dtensor) {
  return python("x._local_tensor.tolist()", dtensor).cast<std::vector<double>>();
}

TEST(Redistribute, GivesTheLastRankWhatIsLeft) {
  const auto result = redistributed(whole(), "(Shard(0),)");
  EXPECT_EQ(local_of(result), std::vector<double>{9});
  EXPECT_TRUE(python("x._spec == spec(line, [Shard(0)], 10)", result).cast<bool>());
}

TEST(Redistribute, ToTheSamePlacementsKeepsTheLocalTensor) {
  const auto dtensor = whole();
  const auto result = redistributed(dtensor, "(Replicate(),)");
  EXPECT_TRUE(
      python("x[0] is not x[1] and x[0]._local_tensor is x[1]._local_tensor", py::make_tuple(dtensor, result))
          .cast<bool>());
}

TEST(Redistribute, RemembersItsTarget) {
  clear_tables();
  const auto before = num_calls("redistribution_target");
  const auto first = redistributed(whole(), "(Shard(0),)");
  const auto second = redistributed(whole(), "(Shard(0),)");
  EXPECT_EQ(num_calls("redistribution_target"), before + 1);
  EXPECT_TRUE(
      python("x[0]._spec == x[1]._spec and x[0]._spec is not x[1]._spec", py::make_tuple(first, second))
          .cast<bool>());
  redistributed(python("dtensor(line, [Replicate()], torch.arange(10), 10)"), "(Shard(0),)");
  EXPECT_EQ(num_calls("redistribution_target"), before + 2) << "of another dtype";
  redistributed(python("dtensor(line, [Replicate()], torch.arange(11.0), 11)"), "(Shard(0),)");
  EXPECT_EQ(num_calls("redistribution_target"), before + 3) << "of another shape";
}

TEST(Redistribute, ForgetsItsTarget) {
  redistributed(whole(), "(Shard(0),)");
  const auto before = num_calls("redistribution_target");
  clear_tables();
  EXPECT_EQ(local_of(redistributed(whole(), "(Shard(0),)")), std::vector<double>{9});
  EXPECT_EQ(num_calls("redistribution_target"), before + 1);
}

TEST(Redistribute, LeavesTheRestToPyTorch) {
  EXPECT_FALSE(redistributed(whole(), "(OwnPartial(),)")) << "a placement with rules of its own";
  EXPECT_FALSE(redistributed(whole(), "(Shard(1),)")) << "a dim that there is not";
  EXPECT_FALSE(redistributed(whole(), "(Shard(0), Shard(0))")) << "of another mesh";
  EXPECT_FALSE(redistributed(python("torch.ones(2)"), "(Shard(0),)")) << "no DTensor";
}

TEST(FromLocal, MultipliesTheDimThatIsCut) {
  const auto result = from_local(python("torch.ones(3, 2)"), python("grid"), python("(Shard(0), Shard(-1))"),
                                 py::none(), py::none(), py::none());
  EXPECT_TRUE(python("x._spec == spec(grid, [Shard(0), Shard(1)], 6, 4)", result).cast<bool>());
}

TEST(FromLocal, TakesTheShapeThatIsGiven) {
  const auto result = from_local(python("torch.ones(1, 2)"), python("line"), python("(Shard(0),)"),
                                 python("(5, 2)"), python("(2, 1)"), py::none());
  EXPECT_TRUE(python("x._spec == spec(line, [Shard(0)], 5, 2)", result).cast<bool>());
  EXPECT_FALSE(from_local(python("torch.ones(1, 2)"), python("line"), python("(Shard(0),)"), python("(5, 2)"),
                          py::none(), py::none()))
      << "a shape without a stride";
}

TEST(ToLocal, OfAFromLocalHasItsGradient) {
  const auto local = python("torch.ones(3, requires_grad=True)");
  const auto dtensor =
      from_local(local, python("line"), python("(Shard(0),)"), py::none(), py::none(), py::none());
  python("(x * 2).sum().backward()", to_local(dtensor, py::none()));
  EXPECT_EQ(python("x.grad.tolist()", local).cast<std::vector<double>>(), std::vector<double>(3, 2));
}

}  // namespace
}  // namespace funcol::python::to_local_from_local_test
