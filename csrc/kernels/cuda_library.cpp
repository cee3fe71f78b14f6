#include "kernels/cuda_library.h"

#include <dlfcn.h>

#include <system_error>

namespace funcol::kernels {
namespace {

// Returns the path of libfuncol_cuda.so, beside the library or the program that contains this function.
std::filesystem::path library_path() {
  Dl_info here{};
  dladdr(reinterpret_cast<const void*>(&library_path), &here);
  return std::filesystem::absolute(here.dli_fname).replace_filename("libfuncol_cuda.so");
}

constexpr const char* kAbsent =
    "this build of funcol has no CUDA kernels; build it again where the CUDA toolkit (nvcc) is found";

CudaLibrary not_loaded() { return {.error = std::string("the CUDA kernels were not loaded: ") + dlerror()}; }

}  // namespace

CudaLibrary load_cuda_library(const std::filesystem::path& file) {
  std::error_code unknown;
  if (!std::filesystem::exists(file, unknown)) {
    return {.error = kAbsent};
  }
  // Never closed: the runtime holds the kernels until the process ends.
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return not_loaded();
  }
  const auto get = reinterpret_cast<GetCudaFunctions>(dlsym(library, kGetCudaFunctions));
  if (get == nullptr) {
    return not_loaded();
  }
  const CudaFunctions* const functions = get();
  if (!functions->are_of_this_build()) {
    return {.error = "the CUDA kernels in " + file.string() + " are of another build; install funcol again"};
  }
  return {.functions = functions, .error = {}};
}

const CudaLibrary& cuda_library() {
  // Never destroyed: threads may use the library until the process ends.
  static const auto* const library =
      new CudaLibrary(load_cuda_library(library_path()));  // NOLINT(cppcoreguidelines-owning-memory)
  return *library;
}

const char* why_no_cuda_kernels() {
  const auto& [functions, error] = cuda_library();
  return functions != nullptr ? nullptr : error.c_str();
}

RelaxedCapture::RelaxedCapture() {
  if (const auto* const functions = cuda_library().functions) {
    mode_before_ = functions->relax_capture_mode();
  }
}

RelaxedCapture::~RelaxedCapture() {
  if (const auto* const functions = cuda_library().functions) {
    functions->set_capture_mode(mode_before_);
  }
}

}  // namespace funcol::kernels
