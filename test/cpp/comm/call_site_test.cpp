#include "comm/call_site.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "compat/work_names.h"

namespace funcol::call_site_test {
namespace {

class Recording {
 public:
  Recording() {
    set_find_caller([] { return std::make_shared<const std::string>("train.py:41 in step"); });
    record_callers(true);
  }
  ~Recording() { record_callers(false); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
};

std::string text_of(const Text& text) { return text == nullptr ? "none" : *text; }

TEST(CallSite, HasNeitherCallerNorPurposeUnlessTheyAreRecorded) {
  const Label label("aten::mm");
  const auto started = CallSite::now();
  EXPECT_EQ(text_of(started.caller), "none");
  EXPECT_EQ(text_of(started.purpose), "none");
}

TEST(CallSite, HasCallerAndPurposeWhileTheyAreRecorded) {
  const Recording recording;
  const Label label("aten::mm");
  const auto started = CallSite::now();
  EXPECT_EQ(text_of(started.caller), "train.py:41 in step");
  EXPECT_EQ(text_of(started.purpose), "aten::mm");
}

TEST(CallSite, CountsSeconds) {
  const auto started = CallSite::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_GT(started.seconds(), 0.005);
  EXPECT_LT(started.seconds(), 60);
}

TEST(Purposes, AreLabelsFromTheOutermostOnWithoutEmptyOnes) {
  EXPECT_EQ(text_of(current_purpose()), "none");
  const Label outer("aten::mm");
  {
    const Label nothing("");
    const Label inner("all_gather(dim 0, tp)");
    EXPECT_EQ(text_of(current_purpose()), "aten::mm / all_gather(dim 0, tp)");
  }
  EXPECT_EQ(text_of(current_purpose()), "aten::mm");
}

TEST(Purposes, BeginWithTheModule) {
  set_current_module(std::make_shared<const std::string>("layers.0"));
  EXPECT_EQ(text_of(current_purpose()), "layers.0");
  const Label label("aten::mm");
  EXPECT_EQ(text_of(current_purpose()), "layers.0 / aten::mm");
  EXPECT_EQ(text_of(set_current_module(nullptr)), "layers.0");
  EXPECT_EQ(text_of(current_purpose()), "aten::mm");
}

TEST(Purposes, OfABackwardPassAreOfTheModuleOfItsForwardPass) {
  const auto module = std::make_shared<const std::string>("layers.0");
  {
    const BackwardOf backward(module);
    EXPECT_EQ(text_of(current_purpose()), "layers.0");
    const BackwardOf unnamed(nullptr);
    EXPECT_EQ(text_of(current_purpose()), "layers.0");
  }
  EXPECT_EQ(text_of(current_purpose()), "none");
}

TEST(Purposes, AreThoseOfTheThread) {
  const Label label("aten::mm");
  std::thread([] { EXPECT_EQ(text_of(current_purpose()), "none"); }).join();
}

class WorkNames : public testing::Test {
 protected:
  void SetUp() override {
    compat::set_work_name("theirs");
    if (compat::work_name().empty()) {
      GTEST_SKIP() << "this PyTorch release has no names of Works";
    }
  }
  void TearDown() override { compat::set_work_name(""); }
};

TEST_F(WorkNames, AreLeftAloneWhileNobodyReadsPurposes) {
  const Label label("aten::mm");
  const NamedWorks named;
  EXPECT_EQ(compat::work_name(), "theirs");
}

TEST_F(WorkNames, AreThoseOfTheProgramAndThePurpose) {
  const Recording recording;
  const Label label("aten::mm");
  {
    const NamedWorks named;
    EXPECT_EQ(compat::work_name(), "theirs / aten::mm");
  }
  EXPECT_EQ(compat::work_name(), "theirs");
}

}  // namespace
}  // namespace funcol::call_site_test
