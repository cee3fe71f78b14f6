// An operation of a stream: the calls that one group makes on one communicator and one stream, or one call
// without a group.
//
// The calls run at the same time, so a rank may send and receive in any order. All inputs are read before an
// output is poisoned, so a call may work in place.
#pragma once

#include <vector>

#include "nccl/call.h"
#include "nccl/communicator.h"
#include "simulated_gpu.h"

namespace simulated_gpu::nccl {

// Its name is "nccl all_reduce", of a group with several kinds of calls "nccl send + receive".
Work make_work(const CommunicatorPtr& communicator, const std::vector<Call>& calls);

}  // namespace simulated_gpu::nccl
