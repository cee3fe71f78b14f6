#include "comm/group_ref.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace funcol {
namespace {

class GroupRefs : public testing::Test {
 protected:
  void TearDown() override { destroy_all(); }

  // As torch.distributed does: the registry keeps a weak reference, its caller a strong one.
  static GroupPtr add(const std::string& name) {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
    c10d::register_process_group(name, group);
    note_group_added(name);
    return group;
  }

  static void destroy(const std::string& name) {
    note_group_removed(name);
    c10d::unregister_process_group(name);
  }

  static void destroy_all() {
    note_all_groups_removed();
    c10d::unregister_all_process_groups();
  }
};

TEST_F(GroupRefs, KeepTheNameAndNotTheGroup) {
  auto group = add("dp");
  const GroupRef ref(group);
  EXPECT_EQ(ref.name(), group_name(*group));
  EXPECT_EQ(group.use_count(), 1);
}

TEST_F(GroupRefs, OfALivingGroupIsNotDestroyed) {
  const auto dp = add("dp");
  const auto tp = add("tp");
  const GroupRef ref(dp);
  destroy("tp");
  EXPECT_FALSE(ref.is_destroyed());
}

TEST_F(GroupRefs, OfAGroupThatLeftTheRegistryIsDestroyedWhoeverHoldsIt) {
  const auto group = add("dp");
  const GroupRef ref(group);
  destroy("dp");
  EXPECT_TRUE(ref.is_destroyed());
}

TEST_F(GroupRefs, OfAGroupIsDestroyedWithAllOthers) {
  const auto dp = add("dp");
  const auto tp = add("tp");
  const GroupRef ref(tp);
  destroy_all();
  EXPECT_TRUE(ref.is_destroyed());
}

TEST_F(GroupRefs, OfAGroupThatNobodyHoldsIsDestroyed) {
  auto group = add("dp");
  const GroupRef ref(group);
  group.reset();
  EXPECT_TRUE(ref.is_destroyed());
}

TEST_F(GroupRefs, OfAGroupThatWasNeverRegisteredIsDestroyedWhenNobodyHoldsIt) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  const GroupRef ref(group);
  destroy_all();
  EXPECT_FALSE(ref.is_destroyed());
  group.reset();
  EXPECT_TRUE(ref.is_destroyed());
}

TEST_F(GroupRefs, AreNotTakenInByANewGroupOfTheSameName) {
  const auto old_group = add("dp");
  const GroupRef old_ref(old_group);
  destroy("dp");
  const auto new_group = add("dp");
  EXPECT_TRUE(old_ref.is_destroyed());
  EXPECT_FALSE(GroupRef(new_group).is_destroyed());
}

TEST_F(GroupRefs, OfOtherThreadsRegistriesLiveOn) {
  c10d::set_thread_isolation_mode(true);
  const auto group = add("dp");
  const GroupRef ref(group);
  std::thread([] {
    const auto theirs = add("dp");
    destroy_all();
  }).join();
  EXPECT_FALSE(ref.is_destroyed());
  destroy_all();
  EXPECT_TRUE(ref.is_destroyed());
  c10d::set_thread_isolation_mode(false);
}

TEST_F(GroupRefs, WithoutAGroupAreNeverDestroyed) {
  EXPECT_FALSE(GroupRef().is_destroyed());
  EXPECT_FALSE(GroupRef("dp").is_destroyed());
}

}  // namespace
}  // namespace funcol
