#include "nccl/mailbox.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "nccl/leftovers.h"
#include "nccl/meeting.h"

namespace simulated_gpu::nccl::mailbox_test {
namespace {

using std::chrono::milliseconds;

// Names of the owners of files: this process, and a process that has ended.
std::string key_of_this_process() {
  static int count = 0;
  return this_process() + "-mailbox_test" + std::to_string(count++);
}

std::string ended_process() {
  int channel[2];
  EXPECT_EQ(pipe(channel), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::string name = this_process();
    const bool written = write(channel[1], name.data(), name.size()) > 0;
    _exit(written ? 0 : 1);
  }
  char name[64] = {};
  EXPECT_GT(read(channel[0], name, sizeof name - 1), 0);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  close(channel[0]);
  close(channel[1]);
  return name;
}

std::filesystem::path file_of(const std::string& key) { return std::string("/dev/shm/") + kFilePrefix + key; }

void make_older(const std::string& key, std::chrono::minutes age) {
  std::filesystem::last_write_time(file_of(key), std::filesystem::file_time_type::clock::now() - age);
}

TEST(Mailbox, ALetterArrivesWithHeadAndBody) {
  const std::string key = key_of_this_process();
  Letter letter(key);
  EXPECT_FALSE(letter.has_arrived());
  EXPECT_TRUE(post(key, "head", "the body", 1));
  ASSERT_TRUE(letter.has_arrived());
  EXPECT_EQ(letter.head(), "head");
  EXPECT_EQ(letter.body(), "the body");
}

TEST(Mailbox, TheBodyIsAligned) {
  const std::string key = key_of_this_process();
  post(key, std::string(65, 'h'), "body", 1);
  Letter letter(key);
  ASSERT_TRUE(letter.has_arrived());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(letter.body().data()) % 64, 0u);
  EXPECT_EQ(letter.body(), "body");
}

TEST(Mailbox, HeadAndBodyMayBeEmpty) {
  const std::string key = key_of_this_process();
  post(key, "", "", 1);
  Letter letter(key);
  ASSERT_TRUE(letter.has_arrived());
  EXPECT_EQ(letter.head(), "");
  EXPECT_EQ(letter.body(), "");
}

TEST(Mailbox, TheLastReaderRemovesTheLetter) {
  const std::string key = key_of_this_process();
  post(key, "head", "", 2);
  {
    Letter first(key);
    ASSERT_TRUE(first.has_arrived());
  }
  EXPECT_TRUE(is_unread(key));
  {
    Letter second(key);
    ASSERT_TRUE(second.has_arrived());
  }
  EXPECT_FALSE(is_unread(key));
}

TEST(Mailbox, AReaderThatNeverSawTheLetterDoesNotCount) {
  const std::string key = key_of_this_process();
  { Letter early(key); }
  post(key, "head", "", 1);
  EXPECT_TRUE(is_unread(key));
  withdraw(key);
}

TEST(Mailbox, ALetterForNobodyIsNotWritten) {
  const std::string key = key_of_this_process();
  EXPECT_TRUE(post(key, "head", "", 0));
  EXPECT_FALSE(is_unread(key));
}

TEST(Mailbox, ASecondLetterOfOneKeyIsRefused) {
  const std::string key = key_of_this_process();
  EXPECT_TRUE(post(key, "first", "", 1));
  EXPECT_FALSE(post(key, "second", "", 1));
  Letter letter(key);
  ASSERT_TRUE(letter.has_arrived());
  EXPECT_EQ(letter.head(), "first");
}

TEST(Mailbox, AReaderKeepsALetterThatIsWithdrawn) {
  const std::string key = key_of_this_process();
  post(key, "head", "", 1);
  Letter letter(key);
  ASSERT_TRUE(letter.has_arrived());
  withdraw(key);
  EXPECT_EQ(letter.head(), "head");
}

TEST(Mailbox, NoFileStaysBehind) {
  const std::string key = key_of_this_process();
  post(key, "head", std::string(100000, 'x'), 1);
  {
    Letter letter(key);
    ASSERT_TRUE(letter.has_arrived());
  }
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_EQ(file.path().string().find(key), std::string::npos) << file.path();
  }
}

TEST(Mailbox, AnotherProcessReadsTheLetter) {
  const std::string key = key_of_this_process();
  const pid_t child = fork();
  if (child == 0) {
    int status = 1;
    {
      Letter letter(key);
      while (!letter.has_arrived()) std::this_thread::sleep_for(milliseconds(1));
      status = letter.body() == "for the child" ? 0 : 2;
    }
    _exit(status);
  }
  post(key, "", "for the child", 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_FALSE(is_unread(key));
}

TEST(Leftovers, ThisProcessIsRunning) { EXPECT_TRUE(is_running(this_process())); }

TEST(Leftovers, AnEndedProcessIsNotRunning) { EXPECT_FALSE(is_running(ended_process())); }

TEST(Leftovers, AnotherProcessOfTheSameNumberIsNotTheOwner) {
  EXPECT_FALSE(is_running(std::to_string(getpid()) + ".1"));
}

TEST(Leftovers, OldFilesOfAnEndedProcessAreRemoved) {
  const std::string key = ended_process() + "-old";
  post(key, "", "", 1);
  make_older(key, std::chrono::minutes(11));
  EXPECT_GE(remove_leftovers(), 1);
  EXPECT_FALSE(is_unread(key));
}

TEST(Leftovers, YoungFilesOfAnEndedProcessStay) {
  const std::string key = ended_process() + "-young";
  post(key, "", "", 1);
  remove_leftovers();
  EXPECT_TRUE(is_unread(key));
  withdraw(key);
}

TEST(Leftovers, OldFilesOfARunningProcessStay) {
  const std::string key = key_of_this_process();
  post(key, "", "", 1);
  make_older(key, std::chrono::minutes(60));
  remove_leftovers();
  EXPECT_TRUE(is_unread(key));
  withdraw(key);
}

TEST(Leftovers, FilesOfOthersStay) {
  const std::filesystem::path file = "/dev/shm/not-" + key_of_this_process();
  std::ofstream(file) << "x";
  std::filesystem::last_write_time(file,
                                   std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  remove_leftovers();
  EXPECT_TRUE(std::filesystem::remove(file));
}

TEST(Meeting, AllLearnWhatAllSaid) {
  const std::string key = key_of_this_process();
  Meeting first(key, 0, 3, "a"), second(key, 1, 3, ""), third(key, 2, 3, "c");
  const std::vector<std::string> all = {"a", "", "c"};
  EXPECT_EQ(first.wait(), all);
  EXPECT_EQ(second.wait(), all);
  EXPECT_EQ(third.wait(), all);
}

TEST(Meeting, OneRankMeetsItself) {
  EXPECT_EQ(Meeting(key_of_this_process(), 0, 1, "a").wait(), std::vector<std::string>{"a"});
}

TEST(Meeting, ARankThatDoesNotComeIsNamed) {
  const std::string key = key_of_this_process();
  Meeting meeting(key, 1, 2, "b");
  EXPECT_EQ(meeting.wait(milliseconds(5)), std::nullopt);
  EXPECT_EQ(meeting.problem(), "rank 0 of 2 did not come within 5 ms");
  EXPECT_FALSE(is_unread(key + "-1"));
}

TEST(Meeting, RanksThatDifferOnTheirNumberAreNamed) {
  const std::string key = key_of_this_process();
  Meeting first(key, 0, 3, "a"), second(key, 1, 2, "b");
  EXPECT_EQ(second.wait(), std::nullopt);
  EXPECT_EQ(second.error(), ncclInvalidArgument);
  EXPECT_EQ(second.problem(), "rank 1 says that there are 2 ranks, rank 0 that there are 3");
  withdraw(key + "-0");
  withdraw(key + "-1");
}

TEST(Meeting, ARankThatComesTwiceIsNamed) {
  const std::string key = key_of_this_process();
  Meeting meeting(key, 0, 2, "a"), again(key, 0, 2, "a");
  EXPECT_EQ(again.wait(), std::nullopt);
  EXPECT_EQ(again.error(), ncclInvalidUsage);
  EXPECT_EQ(again.problem(), "rank 0 comes twice");
  withdraw(key + "-0");
}

}  // namespace
}  // namespace simulated_gpu::nccl::mailbox_test
