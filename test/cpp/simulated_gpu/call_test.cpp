#include "nccl/call.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "nccl/operation.h"

namespace simulated_gpu::nccl::call_test {
namespace {

char input[1], output[1], factor_place[1];  // addresses that nothing reads

Call call_of(CallKind kind, int root = 0) { return {kind, input, output, 3, ncclFloat32, ncclSum, root}; }

struct Expected {
  CallKind kind;
  Sizes root, other;
};

void PrintTo(const Expected& expected, std::ostream* out) { *out << name_of(expected.kind); }

class SizesOfKinds : public ::testing::TestWithParam<Expected> {};

// 3 floats on 2 ranks.
INSTANTIATE_TEST_SUITE_P(Call, SizesOfKinds,
                         ::testing::Values(Expected{CallKind::kAllReduce, {12, 12}, {12, 12}},
                                           Expected{CallKind::kAllGather, {12, 24}, {12, 24}},
                                           Expected{CallKind::kReduceScatter, {24, 12}, {24, 12}},
                                           Expected{CallKind::kBroadcast, {12, 12}, {0, 12}},
                                           Expected{CallKind::kReduce, {12, 12}, {12, 0}},
                                           Expected{CallKind::kAllToAll, {24, 24}, {24, 24}},
                                           Expected{CallKind::kGather, {12, 24}, {12, 0}},
                                           Expected{CallKind::kScatter, {24, 12}, {0, 12}},
                                           Expected{CallKind::kSend, {12, 0}, {12, 0}},
                                           Expected{CallKind::kReceive, {0, 12}, {0, 12}}));

TEST_P(SizesOfKinds, AreThoseOfTheRank) {
  const Sizes root = sizes_of(call_of(GetParam().kind), 0, 2),
              other = sizes_of(call_of(GetParam().kind), 1, 2);
  EXPECT_EQ(root.input, GetParam().root.input);
  EXPECT_EQ(root.output, GetParam().root.output);
  EXPECT_EQ(other.input, GetParam().other.input);
  EXPECT_EQ(other.output, GetParam().other.output);
}

TEST(Call, RangesLeaveOutWhatIsNotTouched) {
  std::vector<Range> reads, writes;
  add_ranges(call_of(CallKind::kBroadcast), 1, 2, reads, writes);
  EXPECT_TRUE(reads.empty());
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_EQ(writes[0].begin, output);
  EXPECT_EQ(writes[0].size, 12u);
}

TEST(Call, AFactorOnTheDeviceIsRead) {
  Call call = call_of(CallKind::kAllReduce);
  call.factor = std::make_shared<const Factor>(Factor{ncclFloat32, {}, factor_place});
  std::vector<Range> reads, writes;
  add_ranges(call, 0, 2, reads, writes);
  ASSERT_EQ(reads.size(), 2u);
  EXPECT_EQ(reads[1].begin, factor_place);
  EXPECT_EQ(reads[1].size, 4u);
}

TEST(Call, TextsNameWhatMustAgree) {
  const auto text = [](CallKind kind) { return to_text(announcement_of(call_of(kind, 1))); };
  EXPECT_EQ(text(CallKind::kAllReduce), "all_reduce(count 3, float32, sum)");
  EXPECT_EQ(text(CallKind::kReduce), "reduce(count 3, float32, root 1, sum)");
  EXPECT_EQ(text(CallKind::kBroadcast), "broadcast(count 3, float32, root 1)");
  EXPECT_EQ(text(CallKind::kSend), "send(count 3, float32, to rank 1)");
  EXPECT_EQ(text(CallKind::kReceive), "receive(count 3, float32, from rank 1)");
  EXPECT_EQ(text(CallKind::kAllToAll), "all_to_all(count 3, float32)");
}

TEST(Call, PremultipliedSumsAgreeWhateverTheirNumbers) {
  Call first = call_of(CallKind::kAllReduce), second = first;
  first.op = static_cast<ncclRedOp_t>(ncclNumOps);
  second.op = static_cast<ncclRedOp_t>(ncclNumOps + 3);
  EXPECT_EQ(announcement_of(first), announcement_of(second));
  EXPECT_EQ(to_text(announcement_of(second)), "all_reduce(count 3, float32, premultiplied sum)");
}

TEST(Operation, IsOneWorkOfAllItsCalls) {
  const auto communicator = std::make_shared<Communicator>("call_test", 0, 1, 0);
  const Work work = make_work(
      communicator, {call_of(CallKind::kSend), call_of(CallKind::kReceive), call_of(CallKind::kSend)});
  EXPECT_EQ(work.name, "nccl send + receive");
  EXPECT_EQ(work.reads.size(), 2u);
  EXPECT_EQ(work.writes.size(), 1u);
  EXPECT_EQ(work.kind, Kind::kCollective);
  EXPECT_EQ(work.chain, communicator.get());
}

}  // namespace
}  // namespace simulated_gpu::nccl::call_test
