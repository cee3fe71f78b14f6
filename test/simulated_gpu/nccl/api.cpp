// The functions of libnccl.so.2 that are simulated.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "nccl/communicator.h"
#include "nccl/creation.h"
#include "nccl/group.h"
#include "nccl/last_error.h"
#include "nccl/reduction.h"

using simulated_gpu::nccl::add;
using simulated_gpu::nccl::CallKind;
using simulated_gpu::nccl::CommunicatorPtr;
using simulated_gpu::nccl::find;
using simulated_gpu::nccl::refuse;

namespace {

ncclResult_t no_communicator() { return refuse(ncclInvalidArgument, "no such communicator"); }

// Writes what `read` finds in a communicator.
template <typename Read>
ncclResult_t ask(ncclComm_t handle, int* result, Read read) {
  const CommunicatorPtr communicator = find(handle);
  if (!communicator || !result) return no_communicator();
  *result = read(*communicator);
  return ncclSuccess;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Communicators.

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return refuse(ncclInvalidArgument, "ncclGetVersion of a null pointer");
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (!id) return refuse(ncclInvalidArgument, "ncclGetUniqueId of a null pointer");
  *id = simulated_gpu::nccl::new_unique_id();
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int num_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return add(simulated_gpu::nccl::begin_init(result, num_ranks, id, rank));
}

ncclResult_t ncclCommInitRank(ncclComm_t* result, int num_ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(result, num_ranks, id, rank, nullptr);
}

// All ranks give the same ids, so the first is enough.
ncclResult_t ncclCommInitRankScalable(ncclComm_t* result, int num_ranks, int rank, int num_ids,
                                      ncclUniqueId* ids, ncclConfig_t* config) {
  if (num_ids < 1 || !ids) return refuse(ncclInvalidArgument, "ncclCommInitRankScalable without a unique id");
  return ncclCommInitRankConfig(result, num_ranks, ids[0], rank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t* results, int num_ranks, const int* devices) {
  return simulated_gpu::nccl::init_all(results, num_ranks, devices);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int order, ncclComm_t* result, ncclConfig_t*) {
  const CommunicatorPtr communicator = find(parent);
  if (!communicator) return no_communicator();
  return add(simulated_gpu::nccl::begin_split(communicator, color, order, result));
}

ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int num_excluded, ncclComm_t* result,
                            ncclConfig_t*, int flags) {
  const CommunicatorPtr communicator = find(parent);
  if (!communicator) return no_communicator();
  if (flags & NCCL_SHRINK_ABORT) communicator->abort();
  return add(simulated_gpu::nccl::begin_shrink(communicator, {excluded, excluded + num_excluded}, result));
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) { return find(handle) ? ncclSuccess : no_communicator(); }

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  return simulated_gpu::nccl::forget(handle) ? ncclSuccess : no_communicator();
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  const CommunicatorPtr communicator = simulated_gpu::nccl::forget(handle);
  if (!communicator) return no_communicator();
  communicator->abort();
  return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t handle, int) {
  const CommunicatorPtr communicator = find(handle);
  if (!communicator) return no_communicator();
  communicator->abort();
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const CommunicatorPtr communicator = find(handle);
  if (!communicator || !error) return no_communicator();
  *error = communicator->error();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  return ask(handle, count, [](const auto& communicator) { return communicator.num_ranks(); });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  return ask(handle, device, [](const auto& communicator) { return communicator.device(); });
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  return ask(handle, rank, [](const auto& communicator) { return communicator.rank(); });
}

const char* ncclGetErrorString(ncclResult_t error) {
  switch (error) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) { return simulated_gpu::nccl::last_error(); }

// Groups.

ncclResult_t ncclGroupStart() {
  simulated_gpu::nccl::start_group();
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() { return simulated_gpu::nccl::end_group(); }

// Collectives.

ncclResult_t ncclAllReduce(const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t communicator, cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kAllReduce, input, output, count, type, op});
}

ncclResult_t ncclReduceScatter(const void* input, void* output, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kReduceScatter, input, output, count, type, op});
}

ncclResult_t ncclReduce(const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t communicator, cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kReduce, input, output, count, type, op, root});
}

ncclResult_t ncclAllGather(const void* input, void* output, size_t count, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kAllGather, input, output, count, type});
}

ncclResult_t ncclAlltoAll(const void* input, void* output, size_t count, ncclDataType_t type,
                          ncclComm_t communicator, cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kAllToAll, input, output, count, type});
}

ncclResult_t ncclBroadcast(const void* input, void* output, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kBroadcast, input, output, count, type, ncclSum, root});
}

ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, communicator, stream);
}

ncclResult_t ncclGather(const void* input, void* output, size_t count, ncclDataType_t type, int root,
                        ncclComm_t communicator, cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kGather, input, output, count, type, ncclSum, root});
}

ncclResult_t ncclScatter(const void* input, void* output, size_t count, ncclDataType_t type, int root,
                         ncclComm_t communicator, cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kScatter, input, output, count, type, ncclSum, root});
}

ncclResult_t ncclSend(const void* input, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kSend, input, nullptr, count, type, ncclSum, peer});
}

ncclResult_t ncclRecv(void* output, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return add(communicator, stream, {CallKind::kReceive, nullptr, output, count, type, ncclSum, peer});
}

// Reduce ops.

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t handle) {
  const CommunicatorPtr communicator = find(handle);
  if (!communicator) return no_communicator();
  if (!op || !scalar || !simulated_gpu::nccl::is_known(type)) {
    return refuse(ncclInvalidArgument, "ncclRedOpCreatePreMulSum without op, scalar or data type");
  }
  simulated_gpu::nccl::Factor factor{type};
  if (residence == ncclScalarHostImmediate) {
    std::memcpy(factor.value.data(), scalar, simulated_gpu::nccl::size_of(type));
  } else {
    factor.device_address = scalar;
  }
  *op = communicator->add_factor(std::make_shared<const simulated_gpu::nccl::Factor>(factor));
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  const CommunicatorPtr communicator = find(handle);
  if (!communicator) return no_communicator();
  return communicator->remove_factor(op) ? ncclSuccess : refuse(ncclInvalidArgument, "no such reduce op");
}

// Memory. Registered buffers are as fast as others here.

ncclResult_t ncclMemAlloc(void** memory, size_t size) {
  return cudaMalloc(memory, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* memory) {
  return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommRegister(const ncclComm_t handle, void* memory, size_t, void** registration) {
  if (!find(handle) || !registration) return no_communicator();
  *registration = memory;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void*) {
  return find(handle) ? ncclSuccess : no_communicator();
}
}
