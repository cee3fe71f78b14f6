#include "comm/group_ref.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "comm/process_group.h"

namespace funcol::group_ref_test {
namespace {

class GroupRefs : public testing::Test {
 protected:
  void TearDown() override { destroy_all(); }

  // Registers a group, to which the registry has a weak reference and the caller a strong one.
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
  EXPECT_FALSE(ref.end().has_value());
}

TEST_F(GroupRefs, OfAGroupThatLeftTheRegistryIsDestroyedWhoeverHoldsIt) {
  const auto group = add("dp");
  const GroupRef ref(group);
  destroy("dp");
  EXPECT_TRUE(ref.end().has_value());
}

TEST_F(GroupRefs, OfAGroupIsDestroyedWithAllOthers) {
  const auto dp = add("dp");
  const auto tp = add("tp");
  const GroupRef ref(tp);
  destroy_all();
  EXPECT_TRUE(ref.end().has_value());
}

TEST_F(GroupRefs, OfAGroupThatNobodyHoldsIsDestroyed) {
  auto group = add("dp");
  const GroupRef ref(group);
  group.reset();
  EXPECT_TRUE(ref.end().has_value());
}

TEST_F(GroupRefs, OfAGroupThatWasNeverRegisteredIsDestroyedWhenNobodyHoldsIt) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  const GroupRef ref(group);
  destroy_all();
  EXPECT_FALSE(ref.end().has_value());
  group.reset();
  EXPECT_TRUE(ref.end().has_value());
}

TEST_F(GroupRefs, AreNotTakenInByANewGroupOfTheSameName) {
  const auto old_group = add("dp");
  const GroupRef old_ref(old_group);
  destroy("dp");
  const auto new_group = add("dp");
  EXPECT_TRUE(old_ref.end().has_value());
  EXPECT_FALSE(GroupRef(new_group).end().has_value());
}

TEST_F(GroupRefs, OfOtherThreadsRegistriesLiveOn) {
  c10d::set_thread_isolation_mode(true);
  const auto group = add("dp");
  const GroupRef ref(group);
  std::thread([] {
    const auto theirs = add("dp");
    destroy_all();
  }).join();
  EXPECT_FALSE(ref.end().has_value());
  destroy_all();
  EXPECT_TRUE(ref.end().has_value());
  c10d::set_thread_isolation_mode(false);
}

TEST_F(GroupRefs, SayHowTheirGroupEnded) {
  const auto destroyed = add("dp");
  const auto aborted = add("tp");
  const auto reconfigured = add("cp");
  const GroupRef dp(destroyed);
  const GroupRef tp(aborted);
  const GroupRef cp(reconfigured);
  destroy("dp");
  note_group_ended(aborted, GroupEnd::kAborted);
  note_group_ended(reconfigured, GroupEnd::kReconfigured);
  EXPECT_EQ(dp.end(), GroupEnd::kDestroyed);
  EXPECT_EQ(tp.end(), GroupEnd::kAborted);
  EXPECT_EQ(cp.end(), GroupEnd::kReconfigured);
  EXPECT_STREQ(to_string(*cp.end()), "was reconfigured");
}

TEST_F(GroupRefs, ThatAreMadeAfterAGroupWasReconfiguredAreOfTheGroupAsItIsNow) {
  const auto group = add("dp");
  const auto before = group_moment();
  note_group_ended(group, GroupEnd::kReconfigured);
  EXPECT_EQ(GroupRef(group).end(), std::nullopt);
  EXPECT_EQ(GroupRef(group, before).end(), GroupEnd::kReconfigured);
}

TEST_F(GroupRefs, OfAnotherGroupLiveOn) {
  const auto dp = add("dp");
  const auto tp = add("tp");
  const GroupRef ref(tp);
  note_group_ended(dp, GroupEnd::kAborted);
  EXPECT_FALSE(ref.end().has_value());
}

TEST_F(GroupRefs, OfAGroupThatWasNeverRegisteredSayHowItEnded) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  const GroupRef ref(group);
  note_group_ended(group, GroupEnd::kAborted);
  EXPECT_EQ(ref.end(), GroupEnd::kAborted);
}

class IdleBackend final : public c10d::Backend {
 public:
  using Backend::Backend;
};

TEST_F(GroupRefs, OfAGroupWithABackendThatEndedSayHow) {
  const auto group = add("dp");
  const auto backend = c10::make_intrusive<IdleBackend>(0, 2);
  const auto other = c10::make_intrusive<IdleBackend>(0, 2);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  const GroupRef ref(group);
  note_backend_ended(*other, GroupEnd::kAborted);
  EXPECT_FALSE(ref.end().has_value());
  note_backend_ended(*backend, GroupEnd::kAborted);
  EXPECT_EQ(ref.end(), GroupEnd::kAborted);
}

TEST_F(GroupRefs, WithoutAGroupNeverEnd) {
  EXPECT_FALSE(GroupRef().end().has_value());
  EXPECT_FALSE(GroupRef("dp").end().has_value());
}

}  // namespace
}  // namespace funcol::group_ref_test
