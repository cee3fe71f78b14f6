// How communicators are made: from a unique id, and from another communicator.
//
// Each function comes to a meeting of the ranks at once, and returns what waits for the others and then
// writes the new handle. A group of NCCL calls begins several before it finishes the first.
#pragma once

#include <nccl.h>

#include <functional>
#include <vector>

#include "nccl/communicator.h"

namespace simulated_gpu::nccl {

using Finish = std::function<ncclResult_t()>;

ncclUniqueId new_unique_id();

// Of the device that is current. Left-over files of killed programs are removed.
Finish begin_init(ncclComm_t* result, int num_ranks, const ncclUniqueId& id, int rank);

// All ranks in this process, on `devices`, or on the first `num_ranks` devices if null.
ncclResult_t init_all(ncclComm_t* results, int num_ranks, const int* devices);

// All ranks of `parent` come; those of one `color` make a child, in the order of `order` and then of their
// ranks.
Finish begin_split(const CommunicatorPtr& parent, int color, int order, ncclComm_t* result);

// The ranks come that are not `excluded`; they keep their order.
Finish begin_shrink(const CommunicatorPtr& parent, const std::vector<int>& excluded, ncclComm_t* result);

}  // namespace simulated_gpu::nccl
