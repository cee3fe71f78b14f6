// libfuncol_cuda.so: the code that calls the CUDA runtime, and the kernels.
//
// The library lies beside the one that this code is in, in builds with CUDA. It is loaded at the first use of
// one of its functions, so that processes without CUDA run without its runtime. The runtime is the shared
// one, which PyTorch has loaded by then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "kernels/box_rows.h"
#include "kernels/random.h"
#include "kernels/rank_major.h"

namespace funcol::kernels {

// The functions of the library. Raise the version when a function's arguments or behaviour change.
struct CudaFunctions {
  static constexpr uint32_t kVersion = 3;

  uint32_t size = sizeof(CudaFunctions);
  uint32_t version = kVersion;
  const char* (*merge_shards)(const void* in, void* out, const ShardShape& shape, void* stream) = nullptr;
  const char* (*split_shards)(const void* in, void* out, const ShardShape& shape, void* stream) = nullptr;
  const char* (*copy_boxes)(const RowBox* boxes, size_t num_boxes, void* stream) = nullptr;
  template <typename T>
  using FillRandom = const char* (*)(T* out, const RandomNumbers& numbers, const int64_t* seed,
                                     const RandomBox& box, void* stream);
  FillRandom<float> fill_random_float = nullptr;
  FillRandom<double> fill_random_double = nullptr;
  FillRandom<int64_t> fill_random_int64 = nullptr;
  FillRandom<bool> fill_random_bool = nullptr;
  // The capture mode of the thread (kernels/capture_mode.h): relaxes it and returns what it was; sets it.
  int (*relax_capture_mode)() = nullptr;
  void (*set_capture_mode)(int mode) = nullptr;

  // Only such functions may be called. Size and version stay first, so that any build can ask.
  bool are_of_this_build() const { return size == sizeof(CudaFunctions) && version == kVersion; }
};

// The one function that the library exports.
using GetCudaFunctions = const CudaFunctions* (*)();
constexpr const char* kGetCudaFunctions = "funcol_cuda_functions";

struct CudaLibrary {
  const CudaFunctions* functions = nullptr;  // for good, or null
  std::string error;                         // why it is null
};

// The library of this process. The first call loads it.
const CudaLibrary& cuda_library();

CudaLibrary load_cuda_library(const std::filesystem::path& file);

}  // namespace funcol::kernels
