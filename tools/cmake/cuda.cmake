# Decides whether the CUDA sources are built, and for which architectures.
#
#   FUNCOL_CUDA        AUTO: if nvcc works and PyTorch is a CUDA build; 0: never; 1: yes, or an error
#   FUNCOL_CUDA_ARCHS  such as "80;90"; machine code for each, and PTX of the newest for later devices
#
# Sets BUILD_CUDA, and with it CUDA_ARCHS and CUDA_TOOLKIT (the version of nvcc), else these are empty.

set(FUNCOL_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, 0 or 1")
set(FUNCOL_CUDA_ARCHS "" CACHE STRING "CUDA architectures; empty: those of 80;90;100 that nvcc knows")

set(BUILD_CUDA OFF)
set(CUDA_ARCHS "")
set(CUDA_TOOLKIT "")

function(choose_cuda_archs nvcc result)
  string(REGEX MATCHALL "[0-9]+[a-z]?" archs "${FUNCOL_CUDA_ARCHS}")
  if(NOT archs)
    execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE known)
    foreach(arch 80 90 100)
      if(known MATCHES "compute_${arch}\n")
        list(APPEND archs ${arch})
      endif()
    endforeach()
  endif()
  list(SORT archs COMPARE NATURAL)
  set(${result} ${archs} PARENT_SCOPE)
endfunction()

if(FUNCOL_CUDA STREQUAL "AUTO" OR FUNCOL_CUDA)
  if(NOT TORCH_CUDA)
    set(no_cuda_reason "PyTorch ${TORCH_VERSION} is a build without CUDA")
  else()
    if(NOT CMAKE_CUDA_COMPILER)
      unset(CMAKE_CUDA_COMPILER CACHE)  # Not found last time: look again.
    endif()
    include(CheckLanguage)
    check_language(CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
      set(no_cuda_reason "no working nvcc was found")
    else()
      choose_cuda_archs(${CMAKE_CUDA_COMPILER} CUDA_ARCHS)
      list(TRANSFORM CUDA_ARCHS APPEND -real OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)
      list(GET CUDA_ARCHS -1 newest_arch)
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest_arch}-virtual)
      enable_language(CUDA)
      find_package(CUDAToolkit REQUIRED)
      set(BUILD_CUDA ON)
      set(CUDA_TOOLKIT ${CMAKE_CUDA_COMPILER_VERSION})
    endif()
  endif()
  if(FUNCOL_CUDA STREQUAL "1" AND NOT BUILD_CUDA)
    message(FATAL_ERROR "FUNCOL_CUDA=1, but ${no_cuda_reason}.")
  endif()
else()
  set(no_cuda_reason "FUNCOL_CUDA=${FUNCOL_CUDA}")
endif()
