// The collectives of this process that are in flight: pending, dropped before they were over, or left to
// PyTorch's registry of Works.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "async/outstanding.h"
#include "comm/collective_info.h"

namespace funcol {

enum class AskWorks : uint8_t {
  kAll,    // those on devices where asking is allowed; a Work that is written in Python needs the GIL
  kOnCpu,  // those that answer without a device or the GIL: for threads that must not wait
};

// The oldest first. A collective is in flight until its Work says that it is over, or somebody has waited
// for it; a Work that is not asked counts as running. To be called without the GIL.
std::vector<InFlight> collectives_in_flight(AskWorks asked);

// Notes a collective that PyTorch's registry holds from now on; it is listed until its Work goes.
void note_registered(std::string_view op, const GroupRef& group, const std::vector<at::Tensor>& outputs,
                     const c10::intrusive_ptr<c10d::Work>& work);

// Waits for what PyTorch's registry has of `tensor`. The error of a collective that was noted names it.
void wait_on_registry(const at::Tensor& tensor);

// "funcol::all_reduce failed on group 'dp'; result of shape [2, 3] has no data."
std::string failure_text(const InFlight& what);

// "It was started 3.0 s ago (rank 1 of 2) at train.py:7, for parameters of layer 0."
std::string origin_text(const InFlight& what);

// "\nAlso in flight in this process: ...", for the error of the collective of `own`; empty if there are none.
std::string others_in_flight(const UnwaitedEntry& own);

// A line for each of them after a line with their number.
std::string in_flight_text(const std::vector<InFlight>& collectives);

}  // namespace funcol
