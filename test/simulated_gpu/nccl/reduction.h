// Arithmetic of collectives, by NCCL's data types and reduce ops.
//
// Ranks are reduced in their order. Types of 8 and 16 floating bits are reduced in float and rounded once, so
// a sum may differ from a GPU's in the last bit. The maximum and minimum of a NaN and a number are NaN, as
// those of PyTorch are; a GPU's NCCL ignores the NaN. A bool is an uint8 of 0 or 1. Averages of integers are
// rounded towards zero.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <string>
#include <vector>

namespace simulated_gpu::nccl {

bool is_known(ncclDataType_t type);
size_t size_of(ncclDataType_t type);
std::string name_of(ncclDataType_t type);  // "bfloat16"
std::string name_of(
    ncclRedOp_t op);  // "sum"; an op that was made by ncclRedOpCreatePreMulSum: "premultiplied sum"

// output[i] = parts[0][i] op parts[1][i] op ..., for i < count. `op` is one of the built-in ops. `output` is
// none of the parts.
void reduce(const std::vector<const void*>& parts, void* output, size_t count, ncclDataType_t type,
            ncclRedOp_t op);

// values[i] *= factor, rounded to `type`; `factor` points to one value of `type`.
void multiply(void* values, size_t count, ncclDataType_t type, const void* factor);

}  // namespace simulated_gpu::nccl
