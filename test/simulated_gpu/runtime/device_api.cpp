// Devices of the CUDA runtime: what they are called and what they can do.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "memory.h"
#include "runtime.h"

namespace simulated_gpu {
namespace {

// cudaRuntimeGetVersion() and cudaDriverGetVersion() of the headers that this was built with.
constexpr int kVersion = CUDART_VERSION;

constexpr int kMultiprocessors = 132;
constexpr int kMostPriorityStep = -5;

bool is_device(int device) { return device >= 0 && device < options().num_devices; }

// An H100 as PyTorch sees it.
cudaDeviceProp properties_of(int device) {
  cudaDeviceProp p;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "Simulated H100 80GB HBM3");
  memset(p.uuid.bytes, 0x40 + device, sizeof p.uuid.bytes);
  p.totalGlobalMem = options().device_bytes;
  p.major = 9;
  p.minor = 0;
  p.multiProcessorCount = kMultiprocessors;
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.sharedMemPerBlock = 49152;
  p.sharedMemPerBlockOptin = 232448;
  p.sharedMemPerMultiprocessor = 233472;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.totalConstMem = 65536;
  p.l2CacheSize = 50 << 20;
  p.memoryBusWidth = 5120;
  for (int i = 0; i < 3; ++i) {
    p.maxThreadsDim[i] = i == 2 ? 64 : 1024;
    p.maxGridSize[i] = i == 0 ? 2147483647 : 65535;
  }
  p.textureAlignment = 512;
  p.pciBusID = 0x10 + device;
  p.asyncEngineCount = 3;
  p.unifiedAddressing = p.canMapHostMemory = p.managedMemory = p.concurrentKernels = 1;
  p.concurrentManagedAccess = p.cooperativeLaunch = p.streamPrioritiesSupported = 1;
  return p;
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;  // NOLINT(google-build-using-namespace)

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = options().num_devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) {
    return remember(cudaErrorInvalidDevice);
  }
  set_current_device(device);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!is_device(device)) {
    return remember(cudaErrorInvalidDevice);
  }
  *properties = properties_of(device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!is_device(device)) {
    return remember(cudaErrorInvalidDevice);
  }
  const cudaDeviceProp p = properties_of(device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = p.maxThreadsDim[2];
      break;
    case cudaDevAttrMaxGridDimX:
      *value = p.maxGridSize[0];
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = p.maxGridSize[1];
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(p.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = p.regsPerBlock;
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrClockRate:
      *value = 1980000;
      break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrStreamPrioritiesSupported:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", 0x10 + device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) {
    *least = 0;
  }
  if (greatest != nullptr) {
    *greatest = kMostPriorityStep;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) { return cudaSuccess; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

// Of cuda_profiler_api.h, which PyTorch's wheels do not bring.
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

cudaError_t cudaDeviceSynchronize() {
  Locked runtime;
  if (const auto error = runtime->captures.check_unsafe_call()) {
    return remember(error);
  }
  return remember(runtime.wait_for_device(current_device()));
}

}  // extern "C"
