// Checks in a forked child process.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

namespace funcol::test {

// Runs `check` in a child process, for at most 60 seconds. Returns true if it returns true there.
template <typename Check>
bool holds_in_child(const Check& check) {
  const auto child = fork();
  if (child == 0) {
    alarm(60);
    _exit(check() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace funcol::test
