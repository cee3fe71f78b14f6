// CUDA graphs: recorded operations with what each comes after.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "access_history.h"
#include "simulated_gpu.h"

namespace simulated_gpu {

struct Node {
  Work work;
  std::vector<size_t> after;        // indices of earlier nodes
  std::vector<const void*> chains;  // see Work::chain
  IssuedPointer issued;             // null where races are not looked for
};
using Nodes = std::vector<Node>;

// An object that a graph keeps alive for the program: cudaUserObject_t.
struct UserObject {
  void* data;
  cudaHostFn_t destroy;
  int references;
};

struct Graph {
  Nodes nodes;
  std::vector<UserObject*> objects;
};

// An instantiated graph. All replays share the nodes.
struct ExecutableGraph {
  std::shared_ptr<const Nodes> nodes;
  std::vector<const void*> chains;

  explicit ExecutableGraph(const Graph& graph);

  // One launch as one operation of its stream: its nodes run one at a time, any of those that are ready.
  Work replay() const;
};

// Node handles are indices: a program only hands them back.
inline cudaGraphNode_t node_handle(size_t index) {
  return reinterpret_cast<cudaGraphNode_t>(index + 1);  // NOLINT(performance-no-int-to-ptr)
}
inline size_t node_index(cudaGraphNode_t node) { return reinterpret_cast<size_t>(node) - 1; }

// The texts of uses of the same bytes that no path through the graph orders.
std::vector<std::string> races_within(const Nodes& nodes);

}  // namespace simulated_gpu
