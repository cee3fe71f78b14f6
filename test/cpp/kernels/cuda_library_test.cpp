#include "kernels/cuda_library.h"

#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace funcol::kernels::cuda_library_test {
namespace {

std::string error_of(const std::filesystem::path& file) {
  const auto library = load_cuda_library(file);
  EXPECT_EQ(library.functions, nullptr);
  return library.error;
}

TEST(CudaLibrary, WhereItIsAbsentTheBuildHasNoKernels) {
  EXPECT_NE(error_of("/nowhere/libfuncol_cuda.so").find("this build of funcol has no CUDA kernels"),
            std::string::npos);
}

TEST(CudaLibrary, TheLoaderSaysWhyItIsNotLoaded) {
  const auto file = std::filesystem::path(::testing::TempDir()) / "libfuncol_cuda_that_is_no_library.so";
  std::ofstream(file) << "no library";
  const auto error = error_of(file);
  std::filesystem::remove(file);
  EXPECT_NE(error.find("the CUDA kernels were not loaded: " + file.string()), std::string::npos) << error;
}

TEST(CudaLibrary, AnotherLibraryIsRefused) {
  Dl_info of_another{};  // the C library: no sanitizer has a function of this name in the program
  ASSERT_NE(dladdr(reinterpret_cast<const void*>(&gnu_get_libc_version), &of_another), 0);
  const auto error = error_of(of_another.dli_fname);
  EXPECT_NE(error.find(kGetCudaFunctions), std::string::npos) << error;
}

TEST(CudaLibrary, FunctionsOfAnotherSizeOrVersionAreOfAnotherBuild) {
  EXPECT_TRUE(CudaFunctions{}.are_of_this_build());
  EXPECT_FALSE((CudaFunctions{.size = sizeof(CudaFunctions) - 8}).are_of_this_build());
  EXPECT_FALSE((CudaFunctions{.version = CudaFunctions::kVersion + 1}).are_of_this_build());
}

TEST(CudaLibrary, ItsFunctionsAreThereOrAReason) {
  EXPECT_EQ(cuda_library().functions == nullptr, !cuda_library().error.empty());
  EXPECT_EQ(cuda_library().functions != nullptr, why_no_cuda_kernels() == nullptr);
}

TEST(CudaLibrary, AGuardOfTheCaptureModeMayLiveWithoutADevice) { const RelaxedCapture relaxed; }

}  // namespace
}  // namespace funcol::kernels::cuda_library_test
