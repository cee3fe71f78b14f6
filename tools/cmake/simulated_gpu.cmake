# The simulated GPU: libraries that replace NVIDIA's, in <build folder>/simulated_gpu. See test/simulated_gpu.
#
# Needs a CUDA 13 build of PyTorch and the headers of CUDA's runtime and of NCCL: those of PyTorch's own packages,
# else the toolkit's. Sets SIMULATED_GPU.

set(SIMULATED_GPU OFF)
find_path(simulated_gpu_cuda_headers cuda_runtime_api.h HINTS ${torch_cuda_include_dir} NO_DEFAULT_PATH)
if(NOT simulated_gpu_cuda_headers)
  find_path(simulated_gpu_cuda_headers cuda_runtime_api.h PATHS ENV CUDA_PATH PATHS /usr/local/cuda
    PATH_SUFFIXES include)
endif()
if(NOT TORCH_CUDA MATCHES "^13\\.")
  set(no_simulated_gpu_reason "PyTorch ${TORCH_VERSION} is not a build with CUDA 13")
elseif(NOT simulated_gpu_cuda_headers OR NOT NCCL_INCLUDE_DIR)
  set(no_simulated_gpu_reason "the headers of CUDA's runtime or of NCCL were not found")
else()
  set(SIMULATED_GPU ON)
endif()
if(NOT SIMULATED_GPU)
  message(STATUS "funcol: simulated GPU left out: ${no_simulated_gpu_reason}")
  return()
endif()

set(simulated_gpu_folder ${CMAKE_CURRENT_BINARY_DIR}/simulated_gpu)

# add_simulated_objects(<target> <folder below test/simulated_gpu> <library>...)
function(add_simulated_objects target folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/test/simulated_gpu/${folder}/*.cpp)
  add_library(${target} OBJECT ${sources})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/test/simulated_gpu)
  target_include_directories(${target} SYSTEM PUBLIC ${simulated_gpu_cuda_headers} ${NCCL_INCLUDE_DIR})
  target_link_libraries(${target} PUBLIC ${ARGN})
endfunction()

# add_simulated_library(<target> <file name> <objects>): the very name that programs ask the loader for.
function(add_simulated_library target file objects)
  add_library(${target} SHARED)
  target_link_libraries(${target} PUBLIC ${objects})
  set_target_properties(${target} PROPERTIES PREFIX "" SUFFIX "" OUTPUT_NAME ${file} NO_SONAME ON
    LIBRARY_OUTPUT_DIRECTORY ${simulated_gpu_folder} LINKER_LANGUAGE CXX)
  target_link_options(${target} PRIVATE -Wl,-soname,${file})
endfunction()

add_simulated_objects(simulated_runtime runtime ${CMAKE_DL_LIBS})
add_simulated_library(simulated_cudart libcudart.so.13 simulated_runtime)
target_link_options(simulated_cudart PRIVATE
  -Wl,--version-script=${PROJECT_SOURCE_DIR}/test/simulated_gpu/runtime/exports.map)

add_simulated_objects(simulated_driver driver simulated_cudart)
add_simulated_library(simulated_cuda libcuda.so.1 simulated_driver)
add_simulated_objects(simulated_collectives nccl simulated_cudart)
target_compile_options(simulated_collectives PRIVATE -O3)
add_simulated_library(simulated_nccl libnccl.so.2 simulated_collectives)
target_link_options(simulated_nccl PRIVATE
  -Wl,--version-script=${PROJECT_SOURCE_DIR}/test/simulated_gpu/nccl/exports.map)
add_simulated_objects(simulated_profiler profiler)
add_simulated_library(simulated_cupti libcupti.so.13 simulated_profiler)
target_link_options(simulated_cupti PRIVATE
  -Wl,--version-script=${PROJECT_SOURCE_DIR}/test/simulated_gpu/profiler/exports.map)
set_target_properties(simulated_driver simulated_collectives PROPERTIES CXX_VISIBILITY_PRESET hidden)

foreach(library torch_cuda c10_cuda)
  add_library(funcol::lib${library} SHARED IMPORTED)
  set_target_properties(funcol::lib${library} PROPERTIES IMPORTED_LOCATION ${torch_lib_dir}/lib${library}.so)
endforeach()
add_simulated_objects(simulated_operators aten simulated_cudart funcol::torch funcol::libtorch_cuda
  funcol::libc10_cuda)
add_simulated_library(simulated_aten libsimulated_gpu_aten.so simulated_operators)

add_simulated_objects(simulated_funcol_kernels funcol simulated_cudart)
target_include_directories(simulated_funcol_kernels PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
add_simulated_library(simulated_kernels_funcol libsimulated_gpu_kernels_funcol.so simulated_funcol_kernels)
