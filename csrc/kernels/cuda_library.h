// libfuncol_cuda.so: the code that calls the CUDA runtime, and the kernels.
//
// In builds with CUDA, the library lies beside the one that contains this code. The first use of one of its
// functions loads it, so that processes without CUDA run without its runtime. The runtime is the shared one,
// which PyTorch has loaded by then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <tuple>

#include "kernels/box_rows.h"
#include "kernels/random.h"
#include "kernels/rank_major.h"

namespace funcol::kernels {

// The functions of the library. Raise the version when a function's arguments or behavior change.
//
// Each kernel enqueues its work on `stream` (a cudaStream_t) of the current device and returns at once: null,
// or the text of the launch error.
struct CudaFunctions {
  static constexpr uint32_t kVersion = 4;

  uint32_t size = sizeof(CudaFunctions);
  uint32_t version = kVersion;
  // The counterparts of the CPU functions (kernels/rank_major.h), for all rows.
  const char* (*merge_shards)(const void* in, void* out, const ShardShape& shape, void* stream) = nullptr;
  const char* (*split_shards)(const void* in, void* out, const ShardShape& shape, void* stream) = nullptr;
  // Copies at most kMaxBoxes boxes, and at least one. They all move in vectors of the narrowest box.
  const char* (*copy_boxes)(const RowBox* boxes, size_t num_boxes, void* stream) = nullptr;
  // Writes the elements of `box` to the shard at `out`. `seed` is in device memory, so that each replay of a
  // graph reads a new seed; the key's offset is 0.
  template <typename T>
  using FillRandom = const char* (*)(T* out, const RandomNumbers& numbers, const int64_t* seed,
                                     const RandomBox& box, void* stream);
  std::tuple<FillRandom<float>, FillRandom<double>, FillRandom<int64_t>, FillRandom<bool>> fill_random = {};
  // Relaxes the thread's capture mode and returns the previous mode; sets the mode (see RelaxedCapture).
  int (*relax_capture_mode)() = nullptr;
  void (*set_capture_mode)(int mode) = nullptr;

  // Returns true if this build may call the functions. Size and version stay first: any build reads them.
  bool are_of_this_build() const { return size == sizeof(CudaFunctions) && version == kVersion; }
};

// The one function that the library exports.
using GetCudaFunctions = const CudaFunctions* (*)();
constexpr const char* kGetCudaFunctions = "funcol_cuda_functions";

struct CudaLibrary {
  const CudaFunctions* functions = nullptr;  // null, or valid until the process ends
  std::string error;                         // why `functions` is null
};

// Returns the library of this process. The first call loads it.
const CudaLibrary& cuda_library();

CudaLibrary load_cuda_library(const std::filesystem::path& file);

// Returns the reason why the library of this process has no functions, or null if it has them.
const char* why_no_cuda_kernels();

// A scope in which the current thread may query events without breaking a CUDA graph capture that any thread
// has in progress. Has no effect without the library.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_before_ = 0;
};

}  // namespace funcol::kernels
