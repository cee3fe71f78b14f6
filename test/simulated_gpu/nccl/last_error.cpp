#include "nccl/last_error.h"

#include <mutex>

namespace simulated_gpu::nccl {
namespace {

std::mutex mutex;
std::string& text() {
  static auto* const text = new std::string();  // never destroyed: threads may outlive main()
  return *text;
}

}  // namespace

ncclResult_t refuse(ncclResult_t error, const std::string& why) {
  const std::scoped_lock lock(mutex);
  text() = why;
  return error;
}

const char* last_error() {
  thread_local std::string copy;
  const std::scoped_lock lock(mutex);
  copy = text();
  return copy.c_str();
}

}  // namespace simulated_gpu::nccl
