// Matchers for the error message of a rejected call.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace funcol::test {

// The call throws an Error and its message has all of these parts.
template <typename Error = std::invalid_argument>
::testing::AssertionResult refuses(const std::function<void()>& call, const std::vector<std::string>& parts) {
  try {
    call();
  } catch (const Error& error) {
    const std::string message = error.what();
    for (const auto& part : parts) {
      if (message.find(part) == std::string::npos) {
        return ::testing::AssertionFailure() << "\"" << message << "\" has no \"" << part << "\"";
      }
    }
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "the call threw nothing";
}

}  // namespace funcol::test
