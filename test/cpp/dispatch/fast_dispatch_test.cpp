#include "dispatch/fast_dispatch.h"

#include <ATen/DTensorState.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "dispatch/call_key.h"
#include "pyobjects/specs.h"
#include "support/python.h"

namespace funcol::python::fast_dispatch_test {
namespace {

using test::python;

uint64_t number(const py::object& spec) { return id_of_spec(spec.ptr()); }

TEST(SpecNumbers, EqualSpecsHaveEqualNumbers) {
  const auto spec = python("spec(line, [Shard(0)], 8)");
  EXPECT_NE(number(spec), 0);
  EXPECT_EQ(number(spec), number(python("spec(line, [Shard(0)], 8)")));
  EXPECT_NE(number(spec), number(python("spec(line, [Shard(0)], 12)")));
  EXPECT_NE(number(spec), number(python("spec(line, [Replicate()], 8)")));
}

TEST(SpecNumbers, AChangedSpecHasAnotherNumber) {
  const auto spec = python("spec(line, [Shard(0)], 8)");
  const auto before = number(spec);
  spec.attr("tensor_meta") = python("meta(12)");
  EXPECT_EQ(number(spec), number(python("spec(line, [Shard(0)], 12)")));
  spec.attr("tensor_meta") = python("meta(8)");
  EXPECT_EQ(number(spec), before);
}

TEST(SpecNumbers, CopiesHaveTheSameNumber) {
  const auto spec = python("spec(line, [Shard(0)], 8)");
  const auto before = number(spec);
  const auto copy = copy_spec(spec);
  EXPECT_EQ(number(copy), before);
  copy.attr("tensor_meta") = python("meta(12)");
  EXPECT_NE(number(copy), before);
  EXPECT_EQ(number(spec), before);
}

TEST(SpecNumbers, KeepNoSpecAlive) {
  const auto spec = python("spec(line, [Shard(0)], 8)");
  const auto held = spec.ref_count();
  number(spec);
  EXPECT_EQ(spec.ref_count(), held);
}

TEST(SpecNumbers, EqualMeshesHaveNumbersOfTheirOwn) {
  EXPECT_NE(number(python("spec(line, [Shard(0)], 8)")), number(python("spec(new_line(), [Shard(0)], 8)")));
}

TEST(SpecNumbers, SpecsWithoutValuesHaveNone) { EXPECT_EQ(number(python("SimpleNamespace()")), 0); }

at::Tensor tensor(const char* expression) { return python(expression).cast<at::Tensor>(); }

constexpr const char* kCut = "dtensor(line, [Shard(0)], torch.ones(2), 8)";

c10::OperatorHandle handle(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

struct ReadCall {
  FastPathStatus status;
  CallKey key;
};

ReadCall read(const DescribedPtr& op, const torch::jit::Stack& stack) {
  Call call;
  const auto status = read_call(op, stack, call);
  return {status, call.key};
}

DescribedPtr described(const char* name, const char* overload) {
  return std::make_shared<DescribedOperator>(
      describe_operator(handle(name, overload), python("DTensor._op_dispatcher")));
}

TEST(ReadCall, KeysOfCallsThatAreDecidedAlikeAreEqual) {
  const auto add = described("aten::add", "Tensor");
  const auto x = tensor(kCut);
  const auto y = tensor(kCut);
  const auto key = read(add, {x, x, 2.0}).key;
  EXPECT_EQ(key, read(add, {y, x, 2.0}).key) << "equal specs";
  EXPECT_EQ(key, read(add, {x, x, 3.0}).key) << "another factor";
  EXPECT_NE(key, read(add, {x, x, -2.0}).key) << "another sign";
  EXPECT_NE(key, read(add, {x, x, 2}).key) << "another kind";
  EXPECT_EQ(key.hash(), read(add, {y, x, 3.0}).key.hash());
}

TEST(ReadCall, ListsAndTextAreInTheKey) {
  const auto view = described("aten::view", "");
  const auto x = tensor(kCut);
  EXPECT_NE(read(view, {x, std::vector<int64_t>{2, 4}}).key, read(view, {x, std::vector<int64_t>{4, 2}}).key);
  const auto div = described("aten::div", "Tensor_mode");
  EXPECT_NE(read(div, {x, x, "floor"}).key, read(div, {x, x, "trunc"}).key);
  EXPECT_NE(read(div, {x, x, "floor"}).key, read(div, {x, x, c10::IValue()}).key);
}

TEST(ReadCall, SaysWhyItDoesNotReadACall) {
  const auto add = described("aten::add", "Tensor");
  const auto x = tensor(kCut);
  EXPECT_EQ(read(add, {x, tensor("torch.tensor(1.0)"), 1}).status, FastPathStatus::kHandled) << "a number";
  EXPECT_EQ(read(add, {x, tensor("torch.ones(8)"), 1}).status, FastPathStatus::kArgument) << "a plain tensor";
  EXPECT_EQ(read(add, {tensor("torch.tensor(1.0)"), tensor("torch.tensor(1.0)"), 1}).status,
            FastPathStatus::kArgument)
      << "no DTensor";
}

TEST(ReadCall, TellsReplicatedTensorsApart) {
  const auto add = described("aten::add", "Tensor");
  const auto x = tensor(kCut);
  const at::DTensorAllowImplicitReplication allowed;
  const auto read_with = [&](const char* plain) { return read(add, {x, tensor(plain), 1}); };
  EXPECT_EQ(read_with("torch.ones(8)").status, FastPathStatus::kHandled);
  EXPECT_EQ(read_with("torch.ones(8)").key, read_with("torch.zeros(8)").key);
  EXPECT_NE(read_with("torch.ones(8)").key, read_with("torch.ones(1)").key);
  EXPECT_NE(read_with("torch.ones(8)").key, read_with("torch.ones(16)[::2]").key) << "another stride";
}

TEST(DescribeOperator, TellsKindsOfResults) {
  using ResultKind = DescribedOperator::ResultKind;
  EXPECT_EQ(described("aten::add", "Tensor")->result_kind, ResultKind::kNew);
  EXPECT_EQ(described("aten::add_", "Tensor")->result_kind, ResultKind::kFirstArgument);
  EXPECT_EQ(described("aten::_foreach_add_", "Scalar")->result_kind, ResultKind::kNone);
  for (const auto* overload : {"out", "Scalar_out"}) {
    EXPECT_EQ(described("aten::add", overload)->result_kind, ResultKind::kOut);
  }
  EXPECT_EQ(described("aten::_local_scalar_dense", "")->result_kind, ResultKind::kNumbers);
  EXPECT_TRUE(described("aten::uniform_", "")->draws);
  EXPECT_FALSE(described("aten::add", "Tensor")->draws);
  EXPECT_EQ(described("aten::equal", "")->result_kind, ResultKind::kUnsupported) << "PyTorch asks all ranks";
  EXPECT_EQ(described("aten::squeeze_", "")->result_kind, ResultKind::kUnsupported)
      << "a tensor of another shape";
}

TEST(PythonArguments, LeaveOutDefaultsAndHaveDtypes) {
  const auto sum = handle("aten::sum", "dim_IntList");
  const auto x = tensor(kCut);
  const auto [args, kwargs] =
      python_arguments(sum, {x, std::vector<int64_t>{0}, false, c10::IValue(at::kDouble)});
  EXPECT_EQ(args.size(), 2);
  EXPECT_TRUE(python("x[1] == [0]", args).cast<bool>());
  EXPECT_TRUE(python("x == {'dtype': torch.float64}", kwargs).cast<bool>());
}

}  // namespace
}  // namespace funcol::python::fast_dispatch_test
