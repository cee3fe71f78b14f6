// Kernels of the CUDA runtime: what nvcc's host code registers and launches.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "memory.h"
#include "runtime.h"

namespace simulated_gpu {
namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> t_configurations;

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&free)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                    free);
  return status == 0 ? text.get() : name;
}

// torch.cuda._sleep(): cycles of a clock of 2 GHz.
Work sleep(const Launch& launch) {
  const std::chrono::nanoseconds time{*static_cast<int64_t*>(launch.args[0]) / 2};
  return {"", [time]() -> Step {
            return [end = SteadyClock::now() + time] { return SteadyClock::now() >= end; };
          }};
}

Implement find_implementation(const std::string& name) {
  if (name.find("spin_kernel") != std::string::npos) {
    return sleep;
  }
  Locked runtime;
  for (const auto& [part_of_name, implement] : runtime->implementations) {
    if (name.find(part_of_name) != std::string::npos) {
      return implement;
    }
  }
  return nullptr;
}

cudaError_t launch_kernel(const void* function, dim3 grid, dim3 block, void** args, cudaStream_t stream) {
  const TracedCall call;
  std::string name = "a kernel that was never registered";
  {
    Locked runtime;
    const auto found = runtime->kernels.find(function);
    if (found != runtime->kernels.end()) {
      name = found->second;
    }
  }
  const Implement implement = find_implementation(name);
  if (!implement) {
    return not_simulated(("no host implementation of a kernel: " + name).c_str());
  }
  Work work = implement({name, grid, block, args});
  work.name = name;
  return enqueue(stream, std::move(work));
}

}  // namespace

void register_kernel(std::string part_of_name, Implement implement) {
  Locked runtime;
  runtime->implementations.emplace_back(std::move(part_of_name), std::move(implement));
}

}  // namespace simulated_gpu

using namespace simulated_gpu;  // NOLINT(google-build-using-namespace)

// NOLINTBEGIN(bugprone-reserved-identifier): the names by which nvcc's code calls the runtime
extern "C" {

// Entry points that nvcc's host code calls. The fat binary is ignored: no device code is read.
void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* binary = nullptr;
  return &binary;
}
void __cudaRegisterFatBinaryEnd(void** /*binary*/) {}
void __cudaUnregisterFatBinary(void** /*binary*/) {}
char __cudaInitModule(void** /*binary*/) { return 1; }

void __cudaRegisterFunction(void** /*binary*/, const char* function, char* /*device_function*/,
                            const char* name, int /*threads*/, uint3* /*tid*/, uint3* /*bid*/,
                            dim3* /*block*/, dim3* /*grid*/, int* /*warp_size*/) {
  std::string text = demangled(name);
  Locked runtime;
  runtime->kernels[function] = std::move(text);
}

void __cudaRegisterVar(void** /*binary*/, char* variable, char* /*device_address*/, const char* /*name*/,
                       int /*is_external*/, size_t size, int /*is_constant*/, int /*is_global*/) {
  void* const address = memory().allocate(size, MemoryKind::kDevice, current_device());
  if (address == nullptr) {
    return;
  }
  memset(host_address(address), 0, size);
  Locked runtime;
  runtime->symbols[variable] = address;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  t_configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration configuration = t_configurations.back();
  t_configurations.pop_back();
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t /*shared*/,
                               cudaStream_t stream) {
  return launch_kernel(kernel, grid, block, args, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args, size_t /*shared*/,
                             cudaStream_t stream) {
  return launch_kernel(function, grid, block, args, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** args,
                                        size_t /*shared*/, cudaStream_t stream) {
  return launch_kernel(function, grid, block, args, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** args) {
  return launch_kernel(function, configuration->gridDim, configuration->blockDim, args,
                       configuration->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*function*/) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* /*function*/, cudaFuncAttribute /*attribute*/, int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t /*kernel*/, cudaFuncAttribute /*attribute*/,
                                            int /*value*/, int /*device*/) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* /*function*/,
                                                          int /*block_size*/, size_t /*shared*/) {
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void* function,
                                                                   int block_size, size_t shared,
                                                                   unsigned /*flags*/) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, function, block_size, shared);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)
