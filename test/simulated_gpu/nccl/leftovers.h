// Names of files in shared memory, by which files that will not be read are recognised and removed.
//
// A file is /dev/shm/simulated_gpu-<owner>-<rest>. The owner is the process that made the unique id of the
// communicator: <pid>.<when it started, in clock ticks since boot>, a pair that no later process shares.
// Ranks that all end normally leave no files. After a failure, or when a program is killed, files stay whose
// owner soon runs no longer.
#pragma once

#include <chrono>
#include <string>

namespace simulated_gpu::nccl {

// The prefix of all names.
extern const char* const kFilePrefix;

// The owner that the calling process is: "4711.88120".
std::string this_process();

bool is_running(const std::string& owner);

// Removes files of owners that no longer run and that were not written for `older_than`. Returns how many.
// The age protects a rank that still reads what a rank that has ended left for it.
int remove_leftovers(std::chrono::seconds older_than = std::chrono::minutes(10));

}  // namespace simulated_gpu::nccl
