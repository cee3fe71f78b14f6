#include <cstdlib>
#include <cstring>
#include <string>

#include "simulated_gpu.h"

namespace simulated_gpu {
namespace {

int64_t number(const char* name, int64_t otherwise) {
  const char* const value = getenv(name);
  return value != nullptr && *value != 0 ? strtoll(value, nullptr, 0) : otherwise;
}

Options::Order order_of(const char* name) {
  const std::string value = name == nullptr ? "random" : name;
  if (value == "last") {
    return Options::Order::kLast;
  }
  if (value == "lazy") {
    return Options::Order::kLazy;
  }
  return value == "first" ? Options::Order::kFirst : Options::Order::kRandom;
}

std::string text(const char* name) {
  const char* const value = getenv(name);
  return value != nullptr ? value : "";
}

Options read() {
  Options options;
  options.num_devices = static_cast<int>(number("SIMULATED_GPU_DEVICES", options.num_devices));
  options.seed = static_cast<uint64_t>(number("SIMULATED_GPU_SEED", 0));
  options.order = order_of(getenv("SIMULATED_GPU_ORDER"));
  options.delay_us = number("SIMULATED_GPU_DELAY_US", 0);
  options.trace = number("SIMULATED_GPU_TRACE", 0) != 0;
  options.trace_file = text("SIMULATED_GPU_TRACE_FILE");
  options.races = number("SIMULATED_GPU_RACES", 1) != 0;
  options.alone = number("SIMULATED_GPU_ALONE", 0) != 0;
  options.device_bytes = static_cast<size_t>(number("SIMULATED_GPU_DEVICE_MIB", 80 << 10)) << 20;
  return options;
}

}  // namespace

const Options& options() {
  static const Options* const options = new Options(read());
  return *options;
}

}  // namespace simulated_gpu
