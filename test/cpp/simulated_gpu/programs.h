// Small programs that run in processes of their own, since a process has one seed and one order.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace simulated_gpu {

struct Schedule {
  uint64_t seed = 0;
  std::string order = "random";
  bool races = true;
  bool alone = false;  // other ranks of NCCL do not exist
  std::string trace_file = {};
};

struct Outcome {
  int status;  // what the process returned: 0 if all values were right, 1 if not, 66 after reports; -n:
               // signal n
  std::string errors;  // what it wrote to stderr
};

// Runs a program of programs(); ends it after a minute.
Outcome run_program(const std::string& name, const Schedule& schedule);

// Each returns whether its values were right.
const std::map<std::string, std::function<bool()>>& programs();

}  // namespace simulated_gpu
