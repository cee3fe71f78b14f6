// Runs the tests, or with --program=NAME one program of theirs.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "simulated_gpu/programs.h"

int main(int argc, char** argv) {
  const std::string option = "--program=";
  if (argc == 2 && std::string(argv[1]).rfind(option, 0) == 0) {
    const bool right = simulated_gpu::programs().at(argv[1] + option.size())();
    exit(right ? 0 : 1);  // NOLINT(concurrency-mt-unsafe): what is done at exit is a part of the test
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
