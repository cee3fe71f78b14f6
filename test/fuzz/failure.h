// What a fuzzer does with a wrong result: it says what is wrong and ends, so that libFuzzer keeps the input.
#pragma once

#include <cstdlib>
#include <iostream>
#include <string>

namespace funcol::test {

[[noreturn]] inline void fail(const std::string& what) {
  std::cerr << "WRONG: " << what << std::endl;
  std::abort();
}

}  // namespace funcol::test
