#include "comm/process_group.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace funcol {
namespace {

class ProcessGroups : public testing::Test {
 protected:
  void TearDown() override {
    remember_groups(false);
    c10d::unregister_all_process_groups();
    forget_groups();
  }

  // As torch.distributed does: the registry keeps a weak reference, its caller a strong one.
  static GroupPtr add(const std::string& name, int size = 2) {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(0, size);
    c10d::register_process_group(name, group);
    forget_groups();
    return group;
  }
};

TEST_F(ProcessGroups, AreFoundByName) {
  const auto dp = add("dp");
  const auto tp = add("tp");
  EXPECT_EQ(group_from_name("dp", "x"), dp);
  EXPECT_EQ(group_from_name("tp", "x"), tp);
}

TEST_F(ProcessGroups, AreFoundAsObjects) {
  const auto group = add("dp");
  EXPECT_EQ(group_from_ivalue(c10::IValue(group), "x"), group);
  EXPECT_EQ(group_from_ivalue(c10::IValue("dp"), "x"), group);
}

TEST_F(ProcessGroups, AnUnknownNameIsAValueErrorThatNamesItAndTheOp) {
  try {
    group_from_name("nowhere", "all_reduce");
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "'nowhere'", error.what_without_backtrace());
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "funcol::all_reduce", error.what_without_backtrace());
  }
}

TEST_F(ProcessGroups, AnythingElseIsATypeError) {
  EXPECT_THROW(group_from_ivalue(c10::IValue(3), "x"), c10::TypeError);
}

TEST_F(ProcessGroups, RememberedNamesFollowTheRegistry) {
  remember_groups(true);
  const auto old_group = add("dp");
  EXPECT_EQ(group_from_name("dp", "x"), old_group);
  EXPECT_EQ(group_from_name("dp", "x"), old_group);
  c10d::unregister_process_group("dp");
  const auto new_group = add("dp");
  EXPECT_EQ(group_from_name("dp", "x"), new_group);
  c10d::unregister_process_group("dp");
  forget_groups();
  EXPECT_THROW(group_from_name("dp", "x"), c10::ValueError);
}

TEST_F(ProcessGroups, AreNotKeptAliveByBeingRemembered) {
  remember_groups(true);
  auto group = add("dp");
  group_from_name("dp", "x");
  EXPECT_EQ(group.use_count(), 1);
}

TEST_F(ProcessGroups, AreRememberedPastTheNumberOfSlots) {
  remember_groups(true);
  std::vector<GroupPtr> groups;
  for (int i = 0; i < 20; ++i) {
    groups.push_back(add("group " + std::to_string(i)));
  }
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(group_from_name("group " + std::to_string(i), "x"), groups[i]);
    }
  }
}

TEST_F(ProcessGroups, AreFoundFromAnyThread) {
  remember_groups(true);
  const auto group = add("dp");
  GroupPtr found;
  std::thread([&] { found = group_from_name("dp", "x"); }).join();
  EXPECT_EQ(found, group);
}

TEST_F(ProcessGroups, AGroupSizeThatIsNotTheGroupsIsAValueError) {
  const auto group = add("dp", 4);
  EXPECT_NO_THROW(check_group_size(*group, 4, "x"));
  EXPECT_THROW(check_group_size(*group, 2, "x"), c10::ValueError);
}

}  // namespace
}  // namespace funcol
