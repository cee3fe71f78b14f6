#include "nccl/leftovers.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>

namespace simulated_gpu::nccl {

const char* const kFilePrefix = "simulated_gpu-";

namespace {

constexpr int kFieldsBeforeStart = 19;  // of /proc/<pid>/stat, after the name of the program

// Empty if there is no such process.
std::string start_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t end_of_name = text.rfind(')');  // the name may hold anything, a parenthesis too
  if (end_of_name == std::string::npos) return "";
  std::istringstream fields(text.substr(end_of_name + 1));
  std::string field;
  for (int i = 0; i <= kFieldsBeforeStart; ++i) fields >> field;
  return field;
}

// Empty if the file is not one of ours.
std::string owner_of(const std::string& file) {
  const std::string prefix = kFilePrefix;
  if (!file.starts_with(prefix)) return "";
  const size_t end = file.find('-', prefix.size());
  return end == std::string::npos ? "" : file.substr(prefix.size(), end - prefix.size());
}

}  // namespace

std::string this_process() {
  const std::string pid = std::to_string(getpid());
  return pid + "." + start_of(pid);
}

bool is_running(const std::string& owner) {
  const size_t dot = owner.find('.');
  if (dot == std::string::npos) return false;
  const std::string start = start_of(owner.substr(0, dot));
  return !start.empty() && start == owner.substr(dot + 1);
}

int remove_leftovers(std::chrono::seconds older_than) {
  namespace fs = std::filesystem;
  int num_removed = 0;
  const auto limit = fs::file_time_type::clock::now() - older_than;
  std::error_code error;  // a file may go while we look at it
  for (fs::directory_iterator it("/dev/shm", error), end; !error && it != end; it.increment(error)) {
    const std::string owner = owner_of(it->path().filename().string());
    std::error_code gone;
    if (owner.empty() || is_running(owner) || it->last_write_time(gone) > limit || gone) continue;
    if (fs::remove(it->path(), gone)) ++num_removed;
  }
  return num_removed;
}

}  // namespace simulated_gpu::nccl
