// The functions that PyTorch's libraries import and that are not simulated: windows of memory and one-sided
// operations, communicators on the device, growing, suspending, statistics. Each fails and says so.
#include <nccl.h>

#include <string>

#include "nccl/last_error.h"

// Their parameters are of no interest, so they are defined without them, under other names in C++.
#define NOT_SIMULATED(name)                                                                             \
  extern "C" __attribute__((visibility("default"))) ncclResult_t not_simulated_##name() __asm__(#name); \
  extern "C" ncclResult_t not_simulated_##name() {                                                      \
    return simulated_gpu::nccl::refuse(ncclInvalidUsage, #name " is not simulated");                    \
  }

NOT_SIMULATED(ncclCommGetUniqueId)
NOT_SIMULATED(ncclCommGrow)
NOT_SIMULATED(ncclCommMemStats)
NOT_SIMULATED(ncclCommResume)
NOT_SIMULATED(ncclCommSuspend)
NOT_SIMULATED(ncclCommWindowDeregister)
NOT_SIMULATED(ncclCommWindowRegister)
NOT_SIMULATED(ncclDevCommCreate)
NOT_SIMULATED(ncclDevCommDestroy)
NOT_SIMULATED(ncclGetLsaMultimemDevicePointer)
NOT_SIMULATED(ncclGetPeerDevicePointer)
NOT_SIMULATED(ncclGroupSimulateEnd)
NOT_SIMULATED(ncclPutSignal)
NOT_SIMULATED(ncclSignal)
NOT_SIMULATED(ncclWaitSignal)
NOT_SIMULATED(ncclWinGetUserPtr)
