// Code that is loaded while the program runs, which the CUDA runtime would hand to the driver.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "runtime.h"

using simulated_gpu::not_simulated;

extern "C" {

cudaError_t cudaLibraryGetGlobal(void** /*address*/, size_t* /*size*/, cudaLibrary_t /*library*/,
                                 const char* /*name*/) {
  return not_simulated("cudaLibraryGetGlobal");
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* /*kernel*/, cudaLibrary_t /*library*/, const char* /*name*/) {
  return not_simulated("cudaLibraryGetKernel");
}
cudaError_t cudaLibraryGetKernelCount(unsigned* /*count*/, cudaLibrary_t /*library*/) {
  return not_simulated("cudaLibraryGetKernelCount");
}
cudaError_t cudaLibraryGetManaged(void** /*address*/, size_t* /*size*/, cudaLibrary_t /*library*/,
                                  const char* /*name*/) {
  return not_simulated("cudaLibraryGetManaged");
}
cudaError_t cudaLibraryGetUnifiedFunction(void** /*function*/, cudaLibrary_t /*library*/,
                                          const char* /*symbol*/) {
  return not_simulated("cudaLibraryGetUnifiedFunction");
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t* /*library*/, const void* /*code*/,
                                cudaJitOption* /*jit_options*/, void** /*jit_values*/, unsigned /*num_jit*/,
                                cudaLibraryOption* /*options*/, void** /*values*/, unsigned /*num*/) {
  return not_simulated("cudaLibraryLoadData");
}
cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t* /*library*/, const char* /*file*/,
                                    cudaJitOption* /*jit_options*/, void** /*jit_values*/,
                                    unsigned /*num_jit*/, cudaLibraryOption* /*options*/, void** /*values*/,
                                    unsigned /*num*/) {
  return not_simulated("cudaLibraryLoadFromFile");
}
cudaError_t cudaLibraryUnload(cudaLibrary_t /*library*/) { return cudaSuccess; }

// A function of the simulated driver, else one that answers that it is not supported.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned /*version*/,
                                             unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* status) {
  constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED
  static void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  *function = driver == nullptr ? nullptr : dlsym(driver, symbol);
  if (*function == nullptr) {
    *function = reinterpret_cast<void*>(+[] { return kNotSupported; });
  }
  if (status != nullptr) {
    *status = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

}  // extern "C"
