#include "nccl/group.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "nccl/last_error.h"
#include "nccl/operation.h"
#include "nccl/reduction.h"

namespace simulated_gpu::nccl {
namespace {

struct Issue {
  CommunicatorPtr communicator;
  cudaStream_t stream;
  std::vector<Call> calls;
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;  // the first
  std::vector<Finish> creations;
  std::vector<Issue> issues;
};

thread_local Group group;

bool is_reduction(CallKind kind) {
  return kind == CallKind::kAllReduce || kind == CallKind::kReduce || kind == CallKind::kReduceScatter;
}

// Checks what NCCL checks when it is called, and finds the factor of a premultiplied sum.
ncclResult_t check(const CommunicatorPtr& communicator, Call& call) {
  if (!communicator) return refuse(ncclInvalidArgument, "no such communicator");
  const std::string name = name_of(call.kind);
  if (communicator->is_aborted())
    return refuse(ncclInvalidUsage, name + " on a communicator that was revoked");
  if (const ncclResult_t error = communicator->error()) return error;
  if (!is_known(call.type)) return refuse(ncclInvalidArgument, name + " of an unknown data type");
  if (call.root < 0 || call.root >= communicator->num_ranks()) {
    return refuse(ncclInvalidArgument, name + ": no rank " + std::to_string(call.root) + " of " +
                                           std::to_string(communicator->num_ranks()));
  }
  if (is_reduction(call.kind) && call.op >= ncclNumOps) {
    call.factor = communicator->factor(call.op);
    if (!call.factor) return refuse(ncclInvalidArgument, name + ": no such reduce op");
    if (call.factor->type != call.type) {
      return refuse(ncclInvalidArgument,
                    name + " of " + name_of(call.type) + " by a factor of " + name_of(call.factor->type));
    }
  } else if (call.op < 0 || call.op >= ncclNumOps) {
    return refuse(ncclInvalidArgument, name + ": no such reduce op");
  }
  const Sizes sizes = sizes_of(call, communicator->rank(), communicator->num_ranks());
  if ((sizes.input > 0 && !call.input) || (sizes.output > 0 && !call.output)) {
    return refuse(ncclInvalidArgument, name + " of a null pointer");
  }
  return ncclSuccess;
}

// Requires as many sends to oneself as receives from oneself: others would wait for ever.
ncclResult_t check_self_sends(const Issue& issue) {
  int open = 0;
  for (const Call& call : issue.calls) {
    if (call.root != issue.communicator->rank()) continue;
    open += call.kind == CallKind::kSend ? 1 : call.kind == CallKind::kReceive ? -1 : 0;
  }
  if (open == 0) return ncclSuccess;
  return refuse(ncclInvalidUsage, std::string(open > 0 ? "a send to" : "a receive from") +
                                      " the own rank without its counterpart in the group");
}

ncclResult_t issue_all(const std::vector<Issue>& issues) {
  for (const Issue& issue : issues) {
    if (const ncclResult_t error = check_self_sends(issue)) return error;
  }
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return ncclUnhandledCudaError;
  ncclResult_t result = ncclSuccess;
  for (const Issue& issue : issues) {
    cudaSetDevice(issue.communicator->device());  // the default stream is that of the current device
    if (enqueue(issue.stream, make_work(issue.communicator, issue.calls)) != cudaSuccess) {
      result = refuse(ncclUnhandledCudaError, "the stream takes no operation");
    }
  }
  cudaSetDevice(device);
  return result;
}

// Ends the thread's group, whose depth is 0.
ncclResult_t finish_group() {
  const Group ended = std::exchange(group, {});
  if (ended.error) return ended.error;
  for (const Finish& finish : ended.creations) {
    if (const ncclResult_t error = finish()) return error;
  }
  return issue_all(ended.issues);
}

ncclResult_t note(ncclResult_t error) {
  if (group.depth > 0 && group.error == ncclSuccess) group.error = error;
  return error;
}

}  // namespace

void start_group() { ++group.depth; }

ncclResult_t end_group() {
  const TracedCall call;
  if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd() without ncclGroupStart()");
  return --group.depth == 0 ? finish_group() : ncclSuccess;
}

ncclResult_t add(ncclComm_t handle, cudaStream_t stream, Call call) {
  const TracedCall traced;
  const CommunicatorPtr communicator = find(handle);
  if (const ncclResult_t error = check(communicator, call)) return note(error);
  const auto is_same = [&](const Issue& issue) {
    return issue.communicator == communicator && issue.stream == stream;
  };
  auto issue = std::ranges::find_if(group.issues, is_same);
  if (issue == group.issues.end()) issue = group.issues.insert(issue, {communicator, stream, {}});
  issue->calls.push_back(std::move(call));
  return group.depth > 0 ? ncclSuccess : finish_group();
}

ncclResult_t add(Finish finish) {
  group.creations.push_back(std::move(finish));
  return group.depth > 0 ? ncclSuccess : finish_group();
}

}  // namespace simulated_gpu::nccl
