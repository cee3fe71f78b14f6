// libcuda.so.1: the few functions of the driver that PyTorch calls. cudaGetDriverEntryPointByVersion()
// answers for all others that they are not supported.
//
// Declared by hand: cuda.h renames those that have versions, and only the addresses matter here.
#include "simulated_gpu.h"

#define DRIVER_API extern "C" __attribute__((visibility("default")))

namespace {

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_SUPPORTED = 801 };
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = void*;
using CUstream = cudaStream_t;

thread_local CUcontext t_context = nullptr;

CUresult result_of(cudaError_t error) { return static_cast<CUresult>(error); }

CUcontext context_of(int device) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
}

}  // namespace

DRIVER_API CUresult cuInit(unsigned /*flags*/) { return CUDA_SUCCESS; }

DRIVER_API CUresult cuDriverGetVersion(int* version) { return result_of(cudaDriverGetVersion(version)); }

DRIVER_API CUresult cuDeviceGetCount(int* count) { return result_of(cudaGetDeviceCount(count)); }

DRIVER_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

DRIVER_API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  return result_of(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

DRIVER_API CUresult cuDevicePrimaryCtxGetState(CUdevice /*device*/, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

DRIVER_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

DRIVER_API CUresult cuCtxGetCurrent(CUcontext* context) {
  int device = 0;
  cudaGetDevice(&device);
  *context = t_context != nullptr ? t_context : context_of(device);
  return CUDA_SUCCESS;
}

DRIVER_API CUresult cuCtxSetCurrent(CUcontext context) {
  t_context = context;
  return CUDA_SUCCESS;
}

DRIVER_API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

DRIVER_API CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  auto* const words = reinterpret_cast<unsigned*>(address);  // NOLINT(performance-no-int-to-ptr)
  const auto fill = [=] {
    auto* const to = static_cast<unsigned*>(simulated_gpu::host_address(words));
    for (size_t i = 0; i < count; ++i) {
      to[i] = value;
    }
  };
  return result_of(simulated_gpu::enqueue(
      stream, {"a fill", simulated_gpu::at_once(fill), {}, {{words, count * sizeof(unsigned)}}}));
}

DRIVER_API CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, unsigned value,
                                         unsigned /*flags*/) {
  return cuMemsetD32Async(address, value, 1, stream);
}

DRIVER_API CUresult cuLogsRegisterCallback(void* /*function*/, void* /*data*/, void* /*handle*/) {
  return CUDA_SUCCESS;
}

DRIVER_API CUresult cuLogsUnregisterCallback(void* /*handle*/) { return CUDA_SUCCESS; }

// Functions that PyTorch links and the simulation lacks.
#define NOT_SIMULATED(name) \
  DRIVER_API CUresult name() { return CUDA_ERROR_NOT_SUPPORTED; }
NOT_SIMULATED(cuFuncGetAttribute)
NOT_SIMULATED(cuFuncSetAttribute)
NOT_SIMULATED(cuFuncSetCacheConfig)
NOT_SIMULATED(cuLaunchCooperativeKernel)
NOT_SIMULATED(cuLaunchKernel)
NOT_SIMULATED(cuLinkAddData_v2)
NOT_SIMULATED(cuLinkComplete)
NOT_SIMULATED(cuLinkCreate_v2)
NOT_SIMULATED(cuMemGetAddressRange)
NOT_SIMULATED(cuModuleGetFunction)
NOT_SIMULATED(cuModuleLoad)
NOT_SIMULATED(cuModuleLoadData)
NOT_SIMULATED(cuModuleLoadDataEx)
NOT_SIMULATED(cuModuleUnload)
NOT_SIMULATED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SIMULATED(cuPointerGetAttribute)
NOT_SIMULATED(cuTensorMapEncodeTiled)
