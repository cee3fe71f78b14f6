#include "pyobjects/arguments.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/python_variable.h>

#include "comm/process_group.h"
#include "support/python.h"
#include "support/refuses.h"

namespace funcol::python::arguments_test {
namespace {

using test::python;
using test::refuses;

// A Python context that is entered meanwhile.
class Inside {
 public:
  explicit Inside(const char* context) : context_(python(context)) { context_.attr("__enter__")(); }
  ~Inside() { context_.attr("__exit__")(py::none(), py::none(), py::none()); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  py::object context_;
};

constexpr auto* kDTensor = "dtensor(line, [Replicate()], torch.ones(2), 2)";

at::Tensor tensor(const char* expression) { return python(expression).cast<at::Tensor>(); }

TEST(TensorArgument, IsThePlainTensor) {
  const auto object = python("torch.ones(2)");
  EXPECT_TRUE(tensor_argument(object.ptr(), "op").is_same(THPVariable_Unpack(object.ptr())));
}

TEST(TensorArgument, OfASubclassGoesThroughTheDispatcher) {
  EXPECT_FALSE(tensor_argument(python(kDTensor).ptr(), "op").defined());
}

TEST(TensorArgument, UnderAModeGoesThroughTheDispatcher) {
  const auto object = python("torch.ones(2)");
  const Inside mode("torch.overrides.BaseTorchFunctionMode()");
  EXPECT_FALSE(tensor_argument(object.ptr(), "op").defined());
}

TEST(TensorArgument, StaysPlainUnderADefaultDevice) {
  const auto object = python("torch.ones(2)");
  const Inside mode("torch.device('cpu')");
  EXPECT_TRUE(tensor_argument(object.ptr(), "op").defined());
}

TEST(TensorArgument, RefusesOtherObjects) {
  EXPECT_TRUE(
      refuses<c10::TypeError>([] { tensor_argument(python("1").ptr(), "op"); }, {"funcol::op", "int"}));
}

TEST(TensorsArgument, AreTheTensorsOfAList) {
  std::vector<at::Tensor> tensors;
  EXPECT_TRUE(tensors_argument(python("[torch.ones(2), torch.ones(3)]").ptr(), tensors, "op"));
  ASSERT_EQ(tensors.size(), 2);
  EXPECT_EQ(tensors[1].numel(), 3);
}

TEST(TensorsArgument, WithASubclassGoThroughTheDispatcher) {
  std::vector<at::Tensor> tensors;
  const auto list = python("[torch.ones(2), dtensor(line, [Replicate()], torch.ones(2), 2)]");
  EXPECT_FALSE(tensors_argument(list.ptr(), tensors, "op"));
}

TEST(TensorsArgument, RefuseOtherObjects) {
  std::vector<at::Tensor> tensors;
  const auto refused = [&](const char* list) {
    return refuses<c10::TypeError>([&] { tensors_argument(python(list).ptr(), tensors, "op"); },
                                   {"funcol::op"});
  };
  EXPECT_TRUE(refused("torch.ones(2)"));
  EXPECT_TRUE(refused("[torch.ones(2), 1]"));
}

TEST(CheckNoTangents, RefusesADualTensor) {
  const Inside level("torch.autograd.forward_ad.dual_level()");
  const auto dual = python("torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))");
  const auto plain = python("torch.ones(2)");
  PyObject* objects[] = {plain.ptr(), dual.ptr()};  // NOLINT
  EXPECT_NO_THROW(check_no_tangents(objects, 1, "op"));
  EXPECT_TRUE(refuses<c10::NotImplementedError>([&] { check_no_tangents(objects, 2, "op"); }, {"op"}));
}

TEST(StartsHere, UnlessAGradientIsRecorded) {
  EXPECT_TRUE(can_bypass_dispatcher({tensor("torch.ones(2)")}));
  EXPECT_FALSE(can_bypass_dispatcher({tensor("torch.ones(2)"), tensor("torch.ones(2, requires_grad=True)")}));
  const Inside no_grad("torch.no_grad()");
  EXPECT_TRUE(can_bypass_dispatcher({tensor("torch.ones(2, requires_grad=True)")}));
}

TEST(StartsHere, NotOnTheMetaDevice) {
  EXPECT_FALSE(can_bypass_dispatcher({tensor("torch.ones(2, device='meta')")}));
}

TEST(GroupArgument, IsANameOrAGroup) {
  const auto group = group_object(python("dist.group.WORLD").ptr());
  ASSERT_TRUE(group);
  EXPECT_EQ(group_argument(python("dist.group.WORLD").ptr(), Py_None, "op"), group);
  EXPECT_EQ(group_argument(python("dist.group.WORLD.group_name").ptr(), Py_None, "op"), group);
}

TEST(GroupArgument, OfAnotherObjectIsTheResolvers) {
  set_group_resolver(python("lambda group, tag, op: dist.group.WORLD if tag == 'x' else 3").ptr());
  EXPECT_EQ(group_argument(python("[0, 1]").ptr(), python("'x'").ptr(), "op")->getSize(), 4);
  EXPECT_TRUE(refuses<c10::TypeError>(
      [] { group_argument(python("[0, 1]").ptr(), python("'y'").ptr(), "op"); }, {"funcol::op", "list"}));
}

TEST(GroupObject, IsNullForOtherObjects) { EXPECT_FALSE(group_object(python("'0'").ptr())); }

TEST(ReduceOpArgument, IsANameAnObjectOrAKind) {
  for (const char* const max : {"'max'", "dist.ReduceOp(dist.ReduceOp.MAX)", "dist.ReduceOp.MAX"}) {
    EXPECT_EQ(reduce_op_argument(python(max).ptr(), "op").op_, c10d::ReduceOp::MAX) << max;
  }
}

TEST(ReduceOpArgument, RefusesAFactorThatIsMissing) {
  EXPECT_TRUE(refuses<c10::ValueError>(
      [] { reduce_op_argument(python("dist.ReduceOp.PREMUL_SUM").ptr(), "op"); }, {"factor"}));
  EXPECT_TRUE(
      refuses<c10::TypeError>([] { reduce_op_argument(python("3").ptr(), "op"); }, {"funcol::op", "int"}));
}

TEST(IntsArgument, IsAListOrNone) {
  EXPECT_EQ(ints_argument(python("(2, 3)").ptr(), "sizes", "op"), (std::vector<int64_t>{2, 3}));
  EXPECT_TRUE(ints_argument(Py_None, "sizes", "op").empty());
  EXPECT_TRUE(refuses<c10::TypeError>([] { ints_argument(python("[2, 'x']").ptr(), "sizes", "op"); },
                                      {"funcol::op", "sizes", "str"}));
}

TEST(SplitSizes, TellNoneFromAnEmptyList) {
  EXPECT_FALSE(SplitSizes(Py_None, "op").ints().has_value());
  EXPECT_FALSE(SplitSizes(Py_None, "op").given());
  const SplitSizes empty(python("[]").ptr(), "op");
  EXPECT_TRUE(empty.given());
  EXPECT_TRUE(empty.ints().has_value());
}

}  // namespace
}  // namespace funcol::python::arguments_test
