#include "comm/process_group.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <vector>

#include "support/refuses.h"

namespace funcol::process_group_test {
namespace {

using test::refuses;

class ProcessGroups : public testing::Test {
 protected:
  void TearDown() override {
    remember_groups(false);
    c10d::unregister_all_process_groups();
    forget_groups();
  }

  // Registers a group, to which the registry has a weak reference and the caller a strong one.
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
  EXPECT_TRUE(refuses<c10::ValueError>([] { group_from_name("nowhere", "all_reduce"); },
                                       {"'nowhere'", "funcol::all_reduce"}));
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
  groups.reserve(20);
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

// Names every group by its ranks and tag, "a:0,1", but for the tag "none"; counts how often it is asked.
int num_questions = 0;
std::optional<std::string> name_by_ranks(const std::vector<int64_t>& ranks, const std::string& tag) {
  ++num_questions;
  if (tag == "none") {
    return std::nullopt;
  }
  return tag + ":" + c10::Join(",", ranks);
}

TEST_F(ProcessGroups, AreFoundByRanksAndTag) {
  set_ranks_resolver(name_by_ranks);
  remember_groups(true);
  const auto first = add("a:1,2");
  const auto second = add("a,1:2");
  const auto third = add(":1,2");
  const auto fourth = add("2,:1");
  EXPECT_EQ(group_from_ranks({1, 2}, "a", "x"), first);
  EXPECT_EQ(group_from_ranks({2}, "a,1", "x"), second);
  EXPECT_EQ(group_from_ranks({1, 2}, "", "x"), third);
  EXPECT_EQ(group_from_ranks({1}, "2,", "x"), fourth);
}

TEST_F(ProcessGroups, AreAskedForByRanksOnceUntilTheRegistryChanges) {
  set_ranks_resolver(name_by_ranks);
  remember_groups(true);
  const auto group = add("a:0,1");
  num_questions = 0;
  group_from_ranks({0, 1}, "a", "x");
  group_from_ranks({0, 1}, "a", "x");
  EXPECT_EQ(num_questions, 1);
  forget_groups();
  group_from_ranks({0, 1}, "a", "x");
  EXPECT_EQ(num_questions, 2);
}

TEST_F(ProcessGroups, RanksOfNoGroupAreAValueErrorThatNamesThemTheTagAndTheOp) {
  set_ranks_resolver(name_by_ranks);
  EXPECT_TRUE(refuses<c10::ValueError>(
      [] {
        group_from_ranks({4, 5}, "none", "broadcast");
      },
      {"funcol::broadcast: no process group has the ranks [4, 5]", "'none'"}));
}

TEST_F(ProcessGroups, AGroupSizeThatIsNotTheGroupsIsAValueError) {
  const auto group = add("dp", 4);
  EXPECT_NO_THROW(check_group_size(*group, 4, "x"));
  EXPECT_THROW(check_group_size(*group, 2, "x"), c10::ValueError);
}

}  // namespace
}  // namespace funcol::process_group_test
