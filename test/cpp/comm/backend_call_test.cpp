#include "comm/backend_call.h"

#include <gtest/gtest.h>

#include "support/fake_work.h"
#include "support/noted_blocking.h"

namespace funcol::backend_call_test {
namespace {

TEST(OnBackend, CallsWhereItMayBlock) {
  const test::NotedBlocking noted;
  c10d::ProcessGroup group(0, 1);
  const auto started = c10::make_intrusive<test::FakeWork>();
  const auto work = on_backend(group, c10::kCPU, [&](auto&) -> c10::intrusive_ptr<c10d::Work> {
    EXPECT_TRUE(noted.is_inside);
    return started;
  });
  EXPECT_EQ(work, started);
  EXPECT_FALSE(noted.is_inside);
}

}  // namespace
}  // namespace funcol::backend_call_test
