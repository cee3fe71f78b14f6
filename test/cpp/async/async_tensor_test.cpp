#include "async/async_tensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "async/pending_collective.h"
#include "async/wake_fallback.h"
#include "async/wake_key.h"
#include "support/fake_work.h"

namespace funcol::async_tensor_test {
namespace {

using test::FakeWork;

struct Pending {
  c10::intrusive_ptr<FakeWork> work;
  at::Tensor tensor;
};

// A pending tensor of zeros that holds `value` once its Work was waited for.
Pending pending_tensor(at::IntArrayRef sizes, double value = 7) {
  auto output = at::zeros(sizes);
  auto work = c10::make_intrusive<FakeWork>([alias = output.detach(), value]() mutable {
    const at::NoGradGuard no_grad;
    alias.fill_(value);
  });
  StartedCollective start;
  start.op = "all_reduce";
  start.work = work;
  start.outputs = {output};
  return {work, AsyncTensorImpl::wrap(output, c10::make_intrusive<PendingCollective>(std::move(start)))};
}

c10::OperatorHandle operator_named(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

TEST(AsyncTensor, MetadataNeedsNoWait) {
  auto pending = pending_tensor({2, 3});
  EXPECT_EQ(pending.tensor.sizes(), at::IntArrayRef({2, 3}));
  EXPECT_EQ(pending.tensor.strides(), at::IntArrayRef({3, 1}));
  EXPECT_EQ(pending.tensor.scalar_type(), at::kFloat);
  EXPECT_EQ(pending.work->num_waits, 0);
  EXPECT_TRUE(is_pending(pending.tensor));
}

TEST(AsyncTensor, TheFirstOperatorWaitsAndSeesTheData) {
  auto pending = pending_tensor({4});
  EXPECT_EQ(pending.tensor.sum().item<float>(), 28);
  EXPECT_EQ(pending.tensor.sum().item<float>(), 28);
  EXPECT_EQ(pending.work->num_waits, 1);
}

TEST(AsyncTensor, IsPlainToTheDispatcherOnceSettled) {
  auto pending = pending_tensor({4});
  const auto plain_keys = at::zeros({4}).key_set();
  EXPECT_TRUE(pending.tensor.key_set().has(kWakeKey));
  settle(pending.tensor);
  EXPECT_EQ(pending.tensor.key_set(), plain_keys);
  EXPECT_FALSE(is_pending(pending.tensor));
}

TEST(AsyncTensor, ViewsDoNotWaitAndShareTheCollective) {
  auto pending = pending_tensor({4, 2});
  const auto view = pending.tensor.view(-1);
  const auto transposed = pending.tensor.t();
  const auto parts = pending.tensor.split(1);
  EXPECT_EQ(pending.work->num_waits, 0);
  EXPECT_TRUE(is_pending(view) && is_pending(transposed) && is_pending(parts[3]));
  EXPECT_EQ(parts[3].sum().item<float>(), 14);
  EXPECT_EQ(pending.work->num_waits, 1);
  EXPECT_FALSE(is_pending(view));
  EXPECT_EQ(view.sum().item<float>(), 56);
}

TEST(AsyncTensor, RawAccessWaits) {
  auto by_pointer = pending_tensor({4});
  EXPECT_EQ(by_pointer.tensor.data_ptr<float>()[3], 7);
  auto by_storage = pending_tensor({4});
  EXPECT_EQ(static_cast<const float*>(by_storage.tensor.storage().data())[0], 7);
}

TEST(AsyncTensor, RawAccessWaitsWhileTheWakeKeyIsExcluded) {
  auto pending = pending_tensor({4});
  const c10::impl::ExcludeDispatchKeyGuard excluded(kWakeKey);
  EXPECT_EQ(pending.tensor.view({2, 2}).sum().item<float>(), 28);
}

TEST(AsyncTensor, ATensorThatGotTheKeyWithoutTheCollectiveLosesItAtFirstUse) {
  auto pending = pending_tensor({4});
  at::Tensor view;
  {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kWakeKey);
    view = pending.tensor.view({2, 2});
  }
  view = view + 0 * view;
  EXPECT_FALSE(view.key_set().has(kWakeKey));
  EXPECT_EQ(view.sum().item<float>(), 28);
}

TEST(AsyncTensor, ViewsKeepTheirAutogradHistory) {
  auto pending = pending_tensor({4});
  pending.tensor.requires_grad_();
  const auto view = pending.tensor.view({2, 2});
  EXPECT_TRUE(is_pending(view));
  EXPECT_TRUE(view.is_view());
  EXPECT_TRUE(view._base().is_same(pending.tensor));
  (view * view).sum().backward();
  EXPECT_TRUE(pending.tensor.grad().equal(at::full({4}, 14.0F)));
}

TEST(AsyncTensor, AnInPlaceOperatorOnAViewReachesTheBase) {
  auto pending = pending_tensor({4});
  const auto doubled = at::ones({2}).requires_grad_() * 2;
  auto view = pending.tensor.slice(0, 0, 2);
  view.mul_(doubled);
  EXPECT_TRUE(pending.tensor.requires_grad());
  EXPECT_EQ(pending.tensor.sum().item<float>(), 42);
}

TEST(AsyncTensor, DetachStaysPending) {
  auto pending = pending_tensor({4});
  const auto detached = pending.tensor.detach();
  EXPECT_EQ(pending.work->num_waits, 0);
  EXPECT_EQ(detached.sum().item<float>(), 28);
}

TEST(AsyncTensor, AsAnOutArgumentIsWaitedForBeforeItIsWritten) {
  auto pending = pending_tensor({4});
  at::add_out(pending.tensor, at::ones({4}), at::ones({4}));
  EXPECT_EQ(pending.work->num_waits, 1);
  EXPECT_EQ(pending.tensor.sum().item<float>(), 8);
}

TEST(AsyncTensor, InAListOfTensorsIsWaitedFor) {
  auto first = pending_tensor({2}, 1);
  auto second = pending_tensor({2}, 2);
  EXPECT_EQ(at::cat({first.tensor, second.tensor}).sum().item<float>(), 6);
}

TEST(AsyncTensor, InAnOptionalListIsWaitedFor) {
  auto pending = pending_tensor({2}, 1);
  const auto index = pending.tensor.to(at::kLong);
  auto values = pending_tensor({4}, 3);
  c10::List<std::optional<at::Tensor>> indices;
  indices.push_back(index);
  EXPECT_EQ(at::index(values.tensor, indices).sum().item<float>(), 6);
}

TEST(AsyncTensor, ManyThreadsMaySettleAndUseItAtOnce) {
  auto pending = pending_tensor({64});
  std::vector<std::thread> threads;
  threads.reserve(8);
  std::atomic<int> right{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { right += pending.tensor.view({8, 8}).sum().item<float>() == 448 ? 1 : 0; });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(right, 8);
  EXPECT_EQ(pending.work->num_waits, 1);
}

struct Classified {
  const char* name;
  const char* overload;
  OperatorKind kind;
};

class Classification : public testing::TestWithParam<Classified> {};

TEST_P(Classification, FollowsTheSchema) {
  EXPECT_EQ(classify(operator_named(GetParam().name, GetParam().overload)), GetParam().kind);
}

INSTANTIATE_TEST_SUITE_P(Operators, Classification,
                         testing::Values(Classified{"aten::view", "", OperatorKind::kView},
                                         Classified{"aten::transpose", "int", OperatorKind::kView},
                                         Classified{"aten::split", "Tensor", OperatorKind::kView},
                                         Classified{"aten::as_strided", "", OperatorKind::kView},
                                         Classified{"aten::detach", "", OperatorKind::kView},
                                         Classified{"aten::reshape", "", OperatorKind::kComposite},
                                         Classified{"aten::matmul", "", OperatorKind::kComposite},
                                         Classified{"aten::add", "Tensor", OperatorKind::kReader},
                                         Classified{"aten::add_", "Tensor", OperatorKind::kReader},
                                         Classified{"aten::item", "", OperatorKind::kReader},
                                         Classified{"aten::set_data", "", OperatorKind::kReader},
                                         Classified{"aten::copy_", "", OperatorKind::kReader},
                                         Classified{"aten::transpose_", "", OperatorKind::kReader},
                                         Classified{"_c10d_functional::wait_tensor", "",
                                                    OperatorKind::kReader}),
                         [](const auto& info) {
                           std::string name = std::string(info.param.name) + "_" + info.param.overload;
                           std::ranges::replace(name, ':', '_');
                           return name;
                         });

}  // namespace
}  // namespace funcol::async_tensor_test
