// The operators that have a kernel of their own at the wake key wait as the fallback does.
#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "async/async_tensor.h"
#include "async/comm_tensor.h"
#include "async/pending_collective.h"
#include "async/wake_fallback.h"
#include "async/wake_key.h"
#include "support/fake_work.h"

namespace funcol::wake_kernels_test {
namespace {

using test::FakeWork;

// `tensors` may be pending, one, some or all of them.
using Call = std::function<at::Tensor(std::vector<at::Tensor>& tensors)>;

struct Operator {
  const char* name;  // with its overload
  size_t num_tensors;
  bool writes;  // to the first one
  Call call;
};

void PrintTo(const Operator& op, std::ostream* out) { *out << op.name; }

std::vector<Operator> operators() {
  using Tensors = std::vector<at::Tensor>;
  return {
      {"_to_copy", 1, false, [](Tensors& t) { return t[0].to(at::kDouble); }},
      {"add.Tensor", 2, false, [](Tensors& t) { return t[0].add(t[1], 3); }},
      {"add_.Tensor", 2, true, [](Tensors& t) { return t[0].add_(t[1], 3); }},
      {"addmm", 3, false, [](Tensors& t) { return at::addmm(t[0], t[1], t[2], 2, 3); }},
      {"bmm", 2, false, [](Tensors& t) { return t[0].unsqueeze(0).bmm(t[1].unsqueeze(0)); }},
      {"clone", 1, false, [](Tensors& t) { return t[0].clone(at::MemoryFormat::Contiguous); }},
      {"copy_", 2, true, [](Tensors& t) { return t[0].copy_(t[1]); }},
      {"div.Tensor", 2, false, [](Tensors& t) { return t[0].div(t[1]); }},
      {"div_.Tensor", 2, true, [](Tensors& t) { return t[0].div_(t[1]); }},
      {"mm", 2, false, [](Tensors& t) { return t[0].mm(t[1]); }},
      {"mul.Tensor", 2, false, [](Tensors& t) { return t[0].mul(t[1]); }},
      {"mul_.Tensor", 2, true, [](Tensors& t) { return t[0].mul_(t[1]); }},
      {"sub.Tensor", 2, false, [](Tensors& t) { return t[0].sub(t[1], 3); }},
      {"sum", 1, false, [](Tensors& t) { return t[0].sum(); }},
      {"sum.dim_IntList", 1, false, [](Tensors& t) { return t[0].sum({1}, true, at::kDouble); }},
  };
}

at::Tensor values(size_t argument) {
  return at::arange(1, 10, at::kFloat).reshape({3, 3}) + static_cast<double>(argument);
}

at::Tensor pending_with(const at::Tensor& data) {
  auto output = at::zeros_like(data);
  StartedCollective start;
  start.op = "all_reduce";
  start.work = c10::make_intrusive<FakeWork>([alias = output.detach(), data]() mutable {
    const at::NoGradGuard no_grad;
    alias.copy_(data);
  });
  start.outputs = {output};
  return AsyncTensorImpl::wrap(output, c10::make_intrusive<PendingCollective>(std::move(start)));
}

at::Tensor pending(size_t argument) { return pending_with(values(argument)); }

class WakeKernels : public testing::TestWithParam<Operator> {
 protected:
  std::vector<at::Tensor> arguments(at::Tensor (*make)(size_t), size_t made) const {
    std::vector<at::Tensor> tensors;
    tensors.reserve(GetParam().num_tensors);
    for (size_t i = 0; i < GetParam().num_tensors; ++i) {
      tensors.push_back((made >> i & 1) != 0 ? make(i) : values(i));
    }
    return tensors;
  }

  // With each set of the arguments made by `make`.
  void expect_same_as_plain(at::Tensor (*make)(size_t)) const {
    auto plain = arguments(make, 0);
    const auto expected = GetParam().call(plain);
    for (size_t made = 1; made < size_t{1} << GetParam().num_tensors; ++made) {
      auto tensors = arguments(make, made);
      const auto result = GetParam().call(tensors);
      EXPECT_TRUE(result.equal(expected)) << "arguments " << made;
      EXPECT_EQ(result.scalar_type(), expected.scalar_type());
      EXPECT_EQ(GetParam().writes, result.is_same(tensors[0]));
      EXPECT_FALSE(is_pending(result));
      for (const auto& tensor : tensors) {
        EXPECT_FALSE(is_pending(tensor));
      }
    }
  }
};

TEST_P(WakeKernels, AreRegistered) {
  const std::string name = GetParam().name;
  const auto dot = name.find('.');
  const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name.substr(0, dot)).c_str(),
                                                                 overload.c_str());
  EXPECT_TRUE(op.hasKernelForDispatchKey(kWakeKey));
}

TEST_P(WakeKernels, WaitForEveryPendingArgument) { expect_same_as_plain(pending); }

TEST_P(WakeKernels, LeaveCommTensorsToTheFallback) {
  expect_same_as_plain([](size_t argument) { return comm_tensor(values(argument)); });
}

TEST_P(WakeKernels, RecordGradients) {
  const size_t differentiated = GetParam().writes ? 1 : 0;  // a leaf that needs a gradient is not written to
  const auto gradient = [&](size_t made) {
    auto tensors = arguments(pending, made);
    tensors[differentiated].requires_grad_();
    GetParam().call(tensors).sum().backward();
    return tensors[differentiated].grad();
  };
  EXPECT_TRUE(gradient(size_t{1} << differentiated).equal(gradient(0)));
}

INSTANTIATE_TEST_SUITE_P(Operators, WakeKernels, testing::ValuesIn(operators()), [](const auto& info) {
  std::string name = info.param.name;
  std::ranges::replace(name, '.', '_');
  return name;
});

// Numbers are converted here beside some dtypes, which no caller may notice.

struct Arithmetic {
  const char* name;
  bool writes;
  at::Tensor (*call)(const at::Tensor& tensor, const at::Tensor& number);
};

void PrintTo(const Arithmetic& op, std::ostream* out) { *out << op.name; }

const Arithmetic kArithmetic[] = {
    {"add", false, [](const at::Tensor& t, const at::Tensor& n) { return t.add(n, 3); }},
    {"add_", true, [](const at::Tensor& t, const at::Tensor& n) { return t.add_(n, 3); }},
    {"div", false, [](const at::Tensor& t, const at::Tensor& n) { return t.div(n); }},
    {"div_", true, [](const at::Tensor& t, const at::Tensor& n) { return t.div_(n); }},
    {"mul", false, [](const at::Tensor& t, const at::Tensor& n) { return t.mul(n); }},
    {"mul_", true, [](const at::Tensor& t, const at::Tensor& n) { return t.mul_(n); }},
    {"sub", false, [](const at::Tensor& t, const at::Tensor& n) { return t.sub(n, 3); }},
};

// Returns the tensor that Python makes of a number operand.
at::Tensor number(const c10::Scalar& value) { return at::native::wrapped_scalar_tensor(value); }

class NumberBeside : public testing::TestWithParam<Arithmetic> {};

TEST_P(NumberBeside, APendingTensorGivesWhatItGivesBesideAPlainOne) {
  const c10::Scalar numbers[] = {
      2, int64_t{16777217}, int64_t{9007199254740993}, 0.1, -0.0, 1e-46, 1e300, -HUGE_VAL, std::nan("")};
  const auto& op = GetParam();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
    const auto data = at::arange(1, 10, at::kFloat).div(7).to(dtype);
    for (const auto& value : numbers) {
      if (op.writes && dtype == at::kLong && (value.isFloatingPoint() || op.name == std::string("div_"))) {
        EXPECT_ANY_THROW(op.call(pending_with(data), number(value)));
        continue;
      }
      for (const auto& start : {data, data[2]}) {
        const auto expected = op.call(start.clone(), number(value));
        const auto result = op.call(pending_with(start), number(value));
        EXPECT_EQ(result.scalar_type(), expected.scalar_type());
        EXPECT_TRUE(at::allclose(result, expected, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true))
            << dtype << ", " << value;
        EXPECT_TRUE(result.signbit().equal(expected.signbit())) << dtype << ", " << value;
      }
    }
  }
}

TEST_P(NumberBeside, APendingTensorGivesTheSameGradient) {
  const auto differentiate = [](const at::Tensor& leaf) {
    leaf.requires_grad_();
    GetParam().call(leaf, number(0.1)).sum().backward();
    return leaf.grad();
  };
  if (GetParam().writes) {  // to a leaf that needs a gradient: refused
    EXPECT_ANY_THROW(differentiate(pending(0)));
  } else {
    EXPECT_TRUE(differentiate(pending(0)).equal(differentiate(values(0))));
  }
}

TEST_P(NumberBeside, IsLeftAsItIs) {
  const auto two = number(2);
  GetParam().call(pending(0), two);
  EXPECT_EQ(two.scalar_type(), at::kLong);
  EXPECT_EQ(two.item<int64_t>(), 2);
}

INSTANTIATE_TEST_SUITE_P(Operators, NumberBeside, testing::ValuesIn(kArithmetic),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(FailedCollective, RaisesInWakeKernelsToo) {
  auto output = at::zeros({3, 3});
  StartedCollective start;
  start.op = "all_reduce";
  start.work = c10::make_intrusive<FakeWork>([] { throw std::runtime_error("peer is gone"); });
  start.outputs = {output};
  const auto failed = AsyncTensorImpl::wrap(output, c10::make_intrusive<PendingCollective>(std::move(start)));
  EXPECT_THROW(failed.add(1), c10::Error);
  EXPECT_THROW(failed.mm(failed), c10::Error);
}

}  // namespace
}  // namespace funcol::wake_kernels_test
