#include "async/comm_tensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "async/async_tensor.h"
#include "async/wake_key.h"
#include "support/fake_work.h"

namespace funcol::comm_tensor_test {
namespace {

using test::FakeWork;

// Keeps what it is given, and gives Works that fill the tensors with 7.
class FillingBackend final : public c10d::Backend {
 public:
  FillingBackend() : c10d::Backend(0, 2) {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& /*options*/) override {
    given = tensors;
    work = c10::make_intrusive<FakeWork>([tensors] {
      const at::NoGradGuard no_grad;
      tensors[0].detach().fill_(7);
    });
    return work;
  }

  std::vector<at::Tensor> given;
  c10::intrusive_ptr<FakeWork> work;
};

class CommTensors : public testing::Test {
 protected:
  CommTensors()
      : backend_(c10::make_intrusive<FillingBackend>()),
        group_(c10::make_intrusive<c10d::ProcessGroup>(0, 2)) {
    group_->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend_);
    group_->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  }

  void all_reduce(at::Tensor tensor) {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    group_->allreduce(tensors);
  }

  c10::intrusive_ptr<FillingBackend> backend_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

TEST_F(CommTensors, WaitOnceAtTheFirstUse) {
  const auto tensor = comm_tensor(at::zeros({4}));
  all_reduce(tensor);
  EXPECT_TRUE(is_pending(tensor));
  EXPECT_EQ(backend_->work->num_waits, 0);
  EXPECT_EQ(tensor.sum().item<float>(), 28);
  EXPECT_EQ(tensor.sum().item<float>(), 28);
  EXPECT_EQ(backend_->work->num_waits, 1);
}

TEST_F(CommTensors, TheBackendGetsAPlainTensorOfTheSameMemory) {
  const auto tensor = comm_tensor(at::zeros({4}));
  all_reduce(tensor);
  EXPECT_TRUE(AsyncTensorImpl::can_wrap(backend_->given[0]));
  EXPECT_FALSE(backend_->given[0].key_set().has(kWakeKey));
  EXPECT_EQ(backend_->given[0].const_data_ptr(), tensor.unsafeGetTensorImpl()->unsafe_storage().data());
  EXPECT_EQ(backend_->work->num_waits, 0);
}

TEST_F(CommTensors, RawAccessWaits) {
  const auto tensor = comm_tensor(at::zeros({4}));
  all_reduce(tensor);
  EXPECT_EQ(tensor.data_ptr<float>()[3], 7);
}

TEST_F(CommTensors, RawAccessWaitsWhileTheWakeKeyIsExcluded) {
  const c10::impl::ExcludeDispatchKeyGuard excluded(kWakeKey);
  const auto tensor = comm_tensor(at::zeros({4}));
  all_reduce(tensor);
  EXPECT_EQ(tensor.view({2, 2}).sum().item<float>(), 28);
}

TEST_F(CommTensors, CollectivesMayBeStartedAgain) {
  const auto tensor = comm_tensor(at::zeros({4}));
  all_reduce(tensor);
  const auto first = backend_->work;
  all_reduce(tensor);
  EXPECT_EQ(first->num_waits, 1);
  EXPECT_EQ(backend_->work->num_waits, 0);
  EXPECT_TRUE(is_pending(tensor));
}

TEST_F(CommTensors, PlainTensorsAreLeftAlone) {
  const auto tensor = at::zeros({4});
  all_reduce(tensor);
  EXPECT_FALSE(is_pending(tensor));
  EXPECT_TRUE(backend_->given[0].is_same(tensor));
}

TEST_F(CommTensors, ACopiedImplementationWaitsToo) {
  const auto tensor = comm_tensor(at::zeros({4}));
  const at::Tensor copy(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
  all_reduce(tensor);
  EXPECT_EQ(copy.sum().item<float>(), 28);
}

TEST_F(CommTensors, AKindOfItsOwnIsNotMadeOne) {
  const auto nested = at::_nested_tensor_from_tensor_list({comm_tensor(at::ones({2})), at::ones({3})});
  EXPECT_TRUE(nested.is_nested());
  EXPECT_EQ(AsyncTensorImpl::of(nested), nullptr);
}

TEST_F(CommTensors, ANestedViewOfAPendingOneWaitsWhenItIsMade) {
  const auto tensor = comm_tensor(at::zeros({4}));
  all_reduce(tensor);
  const auto sizes = at::tensor({2, 2}, at::kLong).view({2, 1});
  const auto strides = at::ones({2, 1}, at::kLong);
  const auto offsets = at::tensor({0, 2}, at::kLong);
  const auto nested = at::_nested_view_from_buffer(tensor, sizes, strides, offsets);
  EXPECT_EQ(nested.unbind()[1].sum().item<float>(), 14);
}

struct Ranges {
  const char* name;
  at::Tensor (*other)(const at::Tensor&);
  bool overlap;
};

class RangesOfMemory : public testing::TestWithParam<Ranges> {};

TEST_P(RangesOfMemory, OverlapWhereTheyShareBytes) {
  const auto buffer = at::zeros({4, 4});
  const auto other = GetParam().other(buffer);
  const MemoryRange second_row(*buffer[1].unsafeGetTensorImpl());
  EXPECT_EQ(second_row.overlaps(MemoryRange(*other.unsafeGetTensorImpl())), GetParam().overlap);
}

using TensorRef = const at::Tensor&;
INSTANTIATE_TEST_SUITE_P(
    Others, RangesOfMemory,
    testing::Values(Ranges{"itself", [](TensorRef t) { return t[1]; }, true},
                    Ranges{"whole", [](TensorRef t) { return t.t(); }, true},
                    Ranges{"row_before", [](TensorRef t) { return t[0]; }, false},
                    Ranges{"row_after", [](TensorRef t) { return t[2]; }, false},
                    Ranges{"last_element", [](TensorRef t) { return t[1][3]; }, true},
                    Ranges{"column_counts_its_gaps", [](TensorRef t) { return t.select(1, 0); }, true},
                    Ranges{"empty_at_its_start", [](TensorRef t) { return t[1].slice(0, 0, 0); }, true},
                    Ranges{"other_storage", [](TensorRef t) { return t.clone(); }, false}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace funcol::comm_tensor_test
