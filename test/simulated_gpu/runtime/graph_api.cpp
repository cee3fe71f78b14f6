// Captures and graphs of the CUDA runtime.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <set>

#include "capture.h"
#include "graph.h"
#include "reports.h"
#include "runtime.h"

namespace simulated_gpu {
namespace {

Graph* graph_of(cudaGraph_t handle) { return reinterpret_cast<Graph*>(handle); }
UserObject* object_of(cudaUserObject_t handle) { return reinterpret_cast<UserObject*>(handle); }
ExecutableGraph* executable_of(cudaGraphExec_t handle) { return reinterpret_cast<ExecutableGraph*>(handle); }

std::set<size_t> indices_of(const cudaGraphNode_t* nodes, size_t count) {
  std::set<size_t> indices;
  std::transform(nodes, nodes + count, std::inserter(indices, indices.end()), node_index);
  return indices;
}

cudaError_t begin_capture(cudaStream_t handle, cudaStreamCaptureMode mode, Graph* graph,
                          std::set<size_t> after) {
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  if (!stream) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (runtime->streams.is_default(stream)) {
    return remember(cudaErrorStreamCaptureUnsupported);
  }
  return remember(runtime->captures.begin(stream, mode, graph, std::move(after)));
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;  // NOLINT(google-build-using-namespace)

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return begin_capture(stream, mode, nullptr, {});
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t* nodes, const cudaGraphEdgeData* /*edges*/,
                                          size_t count, cudaStreamCaptureMode mode) {
  return begin_capture(stream, mode, graph_of(graph), indices_of(nodes, count));
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  *out = nullptr;
  Graph* graph = nullptr;
  {
    Locked runtime;
    const StreamPointer stream = runtime.find(handle);
    if (!stream) {
      return remember(cudaErrorInvalidResourceHandle);
    }
    if (const auto error = runtime->captures.end(stream, &graph)) {
      return remember(error);
    }
  }
  for (const std::string& race : races_within(graph->nodes)) {
    report(race);
  }
  *out = reinterpret_cast<cudaGraph_t>(graph);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  if (!stream) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (runtime->streams.is_default(stream) && runtime->captures.blocks_default_stream()) {
    return remember(cudaErrorStreamCaptureImplicit);
  }
  *status = !stream->capture           ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  if (const auto error = cudaStreamIsCapturing(handle, status)) {
    return error;
  }
  if (*status != cudaStreamCaptureStatusActive) {
    return cudaSuccess;
  }
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  auto& handles = stream->capture_handles;
  handles.clear();
  std::transform(stream->capture_after.begin(), stream->capture_after.end(), std::back_inserter(handles),
                 node_handle);
  const auto give = [](auto* out, auto value) {
    if (out != nullptr) {
      *out = value;
    }
  };
  give(id, stream->capture->id);
  give(graph, reinterpret_cast<cudaGraph_t>(stream->capture->graph));
  give(nodes, handles.data());
  give(edges, nullptr);
  give(count, handles.size());
  return cudaSuccess;
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t* nodes,
                                                const cudaGraphEdgeData* /*edges*/, size_t count,
                                                unsigned flags) {
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  if (!stream || !stream->capture) {
    return remember(cudaErrorIllegalState);
  }
  if (flags == cudaStreamSetCaptureDependencies) {
    stream->capture_after.clear();
  }
  stream->capture_after.merge(indices_of(nodes, count));
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = exchange_capture_mode(*mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long /*flags*/) {
  *out = reinterpret_cast<cudaGraphExec_t>(new ExecutableGraph(*graph_of(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(out, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  const TracedCall call;
  const ExecutableGraph& graph = *executable_of(handle);
  Work work = graph.replay();
  const IssuedPointer place = issue_place(work);
  Locked runtime;
  const StreamPointer stream = runtime.find(stream_handle);
  if (!stream) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  return remember(runtime.issue(stream, std::move(work), graph.chains, place));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete executable_of(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  for (UserObject* object : graph_of(graph)->objects) {
    cudaUserObjectRelease(reinterpret_cast<cudaUserObject_t>(object), 1);
  }
  delete graph_of(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  const size_t size = graph_of(graph)->nodes.size();
  if (nodes == nullptr) {
    *count = size;
    return cudaSuccess;
  }
  for (size_t i = 0; i < std::min(*count, size); ++i) {
    nodes[i] = node_handle(i);
  }
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* out, void* data, cudaHostFn_t destroy, unsigned references,
                                 unsigned /*flags*/) {
  *out = reinterpret_cast<cudaUserObject_t>(new UserObject{data, destroy, static_cast<int>(references)});
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned count) {
  UserObject* const object = object_of(handle);
  object->references -= static_cast<int>(count);
  if (object->references <= 0) {
    object->destroy(object->data);
    delete object;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle, unsigned count,
                                      unsigned flags) {
  if ((flags & cudaGraphUserObjectMove) == 0) {
    object_of(handle)->references += static_cast<int>(count);
  }
  graph_of(graph)->objects.push_back(object_of(handle));
  return cudaSuccess;
}

cudaError_t cudaGraphAddNode(cudaGraphNode_t* /*out*/, cudaGraph_t /*graph*/,
                             const cudaGraphNode_t* /*nodes*/, const cudaGraphEdgeData* /*edges*/,
                             size_t /*count*/, cudaGraphNodeParams* /*parameters*/) {
  return not_simulated("cudaGraphAddNode");
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t /*graph*/, const char* /*path*/, unsigned /*flags*/) {
  return not_simulated("cudaGraphDebugDotPrint");
}

cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle* /*out*/, cudaGraph_t /*graph*/,
                                             unsigned /*value*/, unsigned /*flags*/) {
  return not_simulated("cudaGraphConditionalHandleCreate");
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t /*node*/, cudaGraphNode_t* /*nodes*/,
                                         cudaGraphEdgeData* /*edges*/, size_t* /*count*/) {
  return not_simulated("cudaGraphNodeGetDependencies");
}

}  // extern "C"
