#include "dtensor/dispatcher.h"

#include <gtest/gtest.h>
#include <pybind11/stl.h>

#include "support/python.h"

namespace funcol::python::dispatcher_test {
namespace {

using test::python;

py::object wrapped(const char* local, const char* spec) {
  return python::wrapped(python(local), python(spec));
}

TEST(Wrapped, IsADTensor) {
  const auto result = wrapped("torch.ones(2)", "spec(line, [Shard(0)], 8)");
  EXPECT_TRUE(python("type(x) is DTensor and x._local_tensor.tolist() == [1, 1]", result).cast<bool>());
  EXPECT_TRUE(python("x._spec == spec(line, [Shard(0)], 8)", result).cast<bool>());
}

TEST(Wrapped, KeepsListsAndMissingResults) {
  const auto result = wrapped("(torch.ones(2), None)", "(spec(line, [Shard(0)], 8), None)");
  EXPECT_TRUE(python("type(x) is tuple and type(x[0]) is DTensor and x[1] is None", result).cast<bool>());
  EXPECT_TRUE(
      python("type(x) is list", wrapped("[torch.ones(2)]", "[spec(line, [Shard(0)], 8)]")).cast<bool>());
}

TEST(Wrapped, LeavesTheRestToPyTorch) {
  EXPECT_FALSE(wrapped("torch.ones(2)", "None")) << "no spec";
  EXPECT_FALSE(wrapped("3", "None")) << "a number";
  EXPECT_FALSE(wrapped("[torch.ones(2)]", "[]")) << "another length";
}

py::object unwrapped(const char* op, const char* args) {
  return python::unwrapped(python("DTensor._op_dispatcher"), python(op), python(args).cast<py::tuple>());
}

TEST(Unwrapped, HasSpecsAndLocalTensors) {
  const auto info = unwrapped("aten.mul.Tensor", "(dtensor(line, [Shard(0)], torch.ones(2), 8), 3)");
  ASSERT_TRUE(info);
  EXPECT_TRUE(python("x.compute_mesh is line and x.schema is None", info).cast<bool>());
  EXPECT_TRUE(python("x.flat_args_schema == [spec(line, [Shard(0)], 8), 3]", info).cast<bool>());
  EXPECT_TRUE(python("x.local_args[0].tolist() == [1, 1] and x.local_args[1] == 3", info).cast<bool>());
}

TEST(Unwrapped, LeavesTheRestToPyTorch) {
  EXPECT_FALSE(unwrapped("aten.mul.Tensor", "(dtensor(line, [Shard(0)], torch.ones(2), 8), torch.ones(8))"))
      << "a plain tensor";
  EXPECT_FALSE(unwrapped("aten.mul.Tensor", "(3, 3)")) << "no DTensor";
  EXPECT_FALSE(unwrapped("aten.stack.default", "(dtensor(line, [Shard(0)], torch.ones(2), 8), 0)"))
      << "an operator whose arguments are trees";
}

// The OpInfo of `op` on a replicated arange(8) and on 8 ones, of which this rank has two. Its decision wants
// both of `placements`.
py::object info(const char* op, const char* placements, const char* needs_redistribute = "True") {
  const auto schema =
      python((std::string("SimpleNamespace(op=") + op + ", args_schema=tuple(spec(line, [p], 8) for p in " +
              placements + "), kwargs_schema={})")
                 .c_str());
  const auto sharding =
      python((std::string("SimpleNamespace(redistribute_schema=x, use_val_from_redistribute_schema=False, "
                          "needs_redistribute=") +
              needs_redistribute + ")")
                 .c_str(),
             schema);
  return python(
      "SimpleNamespace(output_sharding=x, compute_mesh=line, args_tree_spec=None, local_kwargs={}, "
      "flat_args_schema=[spec(line, [Replicate()], 8), spec(line, [Shard(0)], 8)], "
      "local_args=(torch.arange(8.0), torch.ones(2)))",
      sharding);
}

py::object run(const py::object& info, const py::object& hook) {
  return run_changed(python("DTensor._op_dispatcher"), python("aten.add.Tensor"), info, hook);
}

TEST(RunChanged, MovesArgumentsFirst) {
  const auto hooked = python("[]");
  const auto result = run(info("aten.add.Tensor", "[Shard(0), Shard(0)]"),
                          python("functools.partial(lambda log, op, *args: log.append(args), x)", hooked));
  EXPECT_TRUE(python("x.tolist() == [7, 8]", result).cast<bool>());
  EXPECT_TRUE(python("len(x) == 1 and x[0][2].tolist() == [6, 7]", hooked).cast<bool>());
  EXPECT_TRUE(python("x[0][3] == spec(line, [Shard(0)], 8)", hooked).cast<bool>());
}

TEST(RunChanged, HooksOnlyAMoveOfTheFirst) {
  const auto hooked = python("[]");
  const auto result = run(info("lambda a, b: (a, b)", "[Replicate(), Shard(0)]"), hooked.attr("append"));
  EXPECT_TRUE(python("[t.numel() for t in x] == [8, 2]", result).cast<bool>());
  EXPECT_EQ(py::len(hooked), 0);
}

TEST(RunChanged, LeavesTheRestToPyTorch) {
  EXPECT_FALSE(run(info("aten.add.Tensor", "[Shard(0), Shard(0)]", "False"), py::none())) << "nothing moves";
}

}  // namespace
}  // namespace funcol::python::dispatcher_test
