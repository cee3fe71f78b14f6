// Memory of the CUDA runtime: allocation, and what an address is.
#include <cuda_runtime_api.h>

#include <cstring>

#include "memory.h"
#include "runtime.h"

namespace simulated_gpu {
namespace {

cudaError_t allocate(void** address, size_t size, MemoryKind kind) {
  *address = nullptr;
  {
    Locked runtime;
    if (const auto error = runtime->captures.check_unsafe_call()) {
      return remember(error);
    }
  }
  *address = memory().allocate(size, kind, current_device());
  return remember(*address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

// Frees memory. Waits for the device first, as CUDA does.
cudaError_t release(void* address) {
  if (address == nullptr) {
    return cudaSuccess;
  }
  const auto allocation = memory().find(address);
  if (!allocation || allocation->begin != address) {
    return remember(cudaErrorInvalidValue);
  }
  Locked runtime;
  if (const auto error = runtime->captures.check_unsafe_call()) {
    return remember(error);
  }
  runtime.wait_for_device(allocation->device);
  runtime->history.forget({address, allocation->size});
  return remember(memory().release(address) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaMemoryType type_of(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kDevice:
      return cudaMemoryTypeDevice;
    case MemoryKind::kManaged:
      return cudaMemoryTypeManaged;
    case MemoryKind::kPinned:
    case MemoryKind::kRegistered:
      break;
  }
  return cudaMemoryTypeHost;
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;  // NOLINT(google-build-using-namespace)

extern "C" {

cudaError_t cudaMalloc(void** address, size_t size) { return allocate(address, size, MemoryKind::kDevice); }
cudaError_t cudaMallocManaged(void** address, size_t size, unsigned /*flags*/) {
  return allocate(address, size, MemoryKind::kManaged);
}
cudaError_t cudaHostAlloc(void** address, size_t size, unsigned /*flags*/) {
  return allocate(address, size, MemoryKind::kPinned);
}
cudaError_t cudaMallocHost(void** address, size_t size) {
  return allocate(address, size, MemoryKind::kPinned);
}
cudaError_t cudaFree(void* address) { return release(address); }
cudaError_t cudaFreeHost(void* address) { return release(address); }

cudaError_t cudaHostRegister(void* address, size_t size, unsigned /*flags*/) {
  memory().add_registered(address, size, current_device());
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  return remember(memory().remove_registered(address) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = options().device_bytes;
  *free = *total - memory().used(current_device());
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  if (const auto allocation = memory().find(address)) {
    attributes->type = type_of(allocation->kind);
    attributes->device = allocation->device;
    attributes->devicePointer = const_cast<void*>(address);
    attributes->hostPointer = allocation->kind == MemoryKind::kDevice ? nullptr : const_cast<void*>(address);
  }
  return cudaSuccess;
}

// Memory pools of cudaMallocAsync() hold nothing.
cudaError_t cudaMallocAsync(void** /*address*/, size_t /*size*/, cudaStream_t /*stream*/) {
  return not_simulated("cudaMallocAsync");
}
cudaError_t cudaFreeAsync(void* /*address*/, cudaStream_t /*stream*/) {
  return not_simulated("cudaFreeAsync");
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int /*device*/) {
  static int one_pool;
  *pool = reinterpret_cast<cudaMemPool_t>(&one_pool);
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t /*pool*/, cudaMemPoolAttr /*attribute*/, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t /*pool*/, cudaMemPoolAttr /*attribute*/, void* /*value*/) {
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t /*pool*/, const cudaMemAccessDesc* /*access*/,
                                 size_t /*count*/) {
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t /*pool*/, size_t /*size*/) { return cudaSuccess; }
cudaError_t cudaDeviceGetGraphMemAttribute(int /*device*/, cudaGraphMemAttributeType /*attribute*/,
                                           void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSetGraphMemAttribute(int /*device*/, cudaGraphMemAttributeType /*attribute*/,
                                           void* /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* /*handle*/, void* /*address*/) {
  return not_simulated("cudaIpcGetMemHandle");
}
cudaError_t cudaIpcOpenMemHandle(void** /*address*/, cudaIpcMemHandle_t /*handle*/, unsigned /*flags*/) {
  return not_simulated("cudaIpcOpenMemHandle");
}
cudaError_t cudaIpcCloseMemHandle(void* /*address*/) { return not_simulated("cudaIpcCloseMemHandle"); }

}  // extern "C"
