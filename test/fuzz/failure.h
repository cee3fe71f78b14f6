// Reports a wrong result of a fuzzer and ends the process, so that libFuzzer keeps the input.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <regex>
#include <stdexcept>
#include <string>

namespace funcol::test {

[[noreturn]] inline void fail(const std::string& what) {
  std::cerr << "WRONG: " << what << std::endl;
  std::abort();
}

// The number that the refusal of a plan names where `pattern` has its group; -1 if `plan` refuses nothing.
template <typename F>
int64_t number_in_refusal(F&& plan, const std::string& pattern) {
  try {
    plan();
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    std::smatch found;
    if (!std::regex_search(message, found, std::regex(pattern))) {
      fail("refused without the least bound: " + message);
    }
    return std::stoll(found[1]);
  }
  return -1;
}

}  // namespace funcol::test
