// The trace file: what a program issues and what it waits for.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "simulated_gpu/programs.h"

namespace simulated_gpu::trace_test {
namespace {

using Lines = std::vector<std::string>;

// The lines that a program writes.
Lines trace_of(const std::string& program, bool alone = false) {
  const std::string path = testing::TempDir() + "simulated_gpu_trace" + std::to_string(getpid());
  Schedule schedule;
  schedule.trace_file = path;
  schedule.alone = alone;
  const Outcome outcome = run_program(program, schedule);
  EXPECT_EQ(outcome.status, 0) << outcome.errors;
  Lines lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    lines.push_back(line);
  }
  std::remove(path.c_str());
  return lines;
}

// Returns the lines that contain `text`.
Lines those_with(const std::string& text, const Lines& lines) {
  Lines found;
  for (const std::string& line : lines) {
    if (line.find(text) != std::string::npos) {
      found.push_back(line);
    }
  }
  return found;
}

int64_t number_after(const std::string& key, const std::string& line) {
  const size_t at = line.find("\"" + key + "\": ");
  EXPECT_NE(at, std::string::npos) << key << " in " << line;
  return std::stoll(line.substr(at + key.size() + 4));
}

TEST(Trace, AnOperationHasItsBytesAndWhatItComesAfter) {
  const Lines added = those_with("\"name\": \"add\"", trace_of("trace: two streams"));
  ASSERT_EQ(added.size(), 2U);
  EXPECT_EQ(number_after("read", added[0]), 256);
  EXPECT_EQ(number_after("written", added[0]), 256);
  EXPECT_NE(number_after("stream", added[0]), number_after("stream", added[1]));
}

TEST(Trace, AWaitForAnEventNamesTheOperationsBeforeItsRecord) {
  const Lines lines = trace_of("trace: two streams");
  const Lines added = those_with("\"name\": \"add\"", lines);
  const Lines records = those_with("the record of an event", lines);
  const Lines waits = those_with("a wait for an event", lines);
  ASSERT_EQ(waits.size(), 1U);
  const std::string marked = "[" + std::to_string(number_after("stream", added[0])) + ", " +
                             std::to_string(number_after("number", records[0])) + "]";
  EXPECT_NE(waits[0].find("\"after\": [" + marked + "]"), std::string::npos) << waits[0];
}

TEST(Trace, ASynchronizationNamesWhatTheHostWaitsFor) {
  const Lines lines = trace_of("trace: two streams");
  const Lines added = those_with("\"name\": \"add\"", lines);
  const std::string awaited = "[" + std::to_string(number_after("stream", added[1])) + ", " +
                              std::to_string(number_after("number", added[1])) + "]";
  EXPECT_EQ(those_with("\"waits\": [" + awaited + "]", lines).size(), 1U);
}

TEST(Trace, TimesOfAThreadAscend) {
  int64_t before = 0;
  for (const std::string& line : those_with("\"end\"", trace_of("trace: two streams"))) {
    EXPECT_GE(number_after("begin", line), before);
    EXPECT_GE(number_after("end", line), number_after("begin", line));
    before = number_after("end", line);
  }
  EXPECT_GT(before, 0);
}

TEST(Trace, OwnTimeIsThatBetweenTheCallsOfAThread) {
  const Lines added = those_with("\"name\": \"add\"", trace_of("trace: two streams"));
  ASSERT_EQ(added.size(), 2U);
  EXPECT_GE(number_after("own", added[1]), 0);
  EXPECT_LE(number_after("own", added[1]), number_after("begin", added[1]) - number_after("end", added[0]));
}

TEST(Trace, AMarkIsALineOfItsOwn) {
  const Lines marks = those_with("\"mark\"", trace_of("trace: two streams"));
  ASSERT_EQ(marks.size(), 1U);
  EXPECT_EQ(marks[0].find(R"({"mark": "a \"step\"", "begin": )"), 0U) << marks[0];
}

TEST(Trace, ACollectiveHasItsRanks) {
  const Lines gathers = those_with("nccl all_gather", trace_of("alone: all_gather", true));
  ASSERT_EQ(gathers.size(), 1U);
  EXPECT_NE(gathers[0].find("\"kind\": \"collective\""), std::string::npos) << gathers[0];
  EXPECT_EQ(number_after("ranks", gathers[0]), 4);
  EXPECT_EQ(number_after("written", gathers[0]), 32);
}

}  // namespace
}  // namespace simulated_gpu::trace_test
