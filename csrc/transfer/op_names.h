// The functions of funcol that move tensors, as error messages name them.
#pragma once

namespace funcol {

constexpr auto kDistributeTensor = "distribute_tensor";
constexpr auto kFullTensors = "full_tensors";
constexpr auto kRedistribute = "redistribute";
constexpr auto kRedistributeLocalTensor = "redistribute_local_tensor";
constexpr auto kRedistributeMany = "redistribute_many";

}  // namespace funcol
