# The installed PyTorch as imported targets: funcol::torch for C++, funcol::torch_python for the module.
#
# find_package(Torch) is not used: it demands the very CUDA toolkit that PyTorch was built with.
# Sets TORCH_VERSION and TORCH_CUDA (the CUDA version of a CUDA build, else empty), NCCL_VERSION, and
# PYTHON_EXTENSION_SUFFIX.

execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/torch_info.py
  OUTPUT_VARIABLE torch_info
  ERROR_VARIABLE torch_error
  RESULT_VARIABLE torch_failed)
if(torch_failed)
  message(FATAL_ERROR "${torch_error}")
endif()

foreach(name version is_supported cuda cxx11_abi include_dirs lib_dir cuda_include_dir nccl_include_dir
        python_include_dir python_library extension_suffix)
  string(JSON torch_${name} GET "${torch_info}" ${name})
endforeach()
set(TORCH_VERSION ${torch_version})
set(TORCH_CUDA ${torch_cuda})
set(PYTHON_EXTENSION_SUFFIX ${torch_extension_suffix})

if(NOT EXISTS "${torch_python_include_dir}/Python.h")
  message(FATAL_ERROR
    "The headers of ${Python_EXECUTABLE} are missing (no Python.h in ${torch_python_include_dir}). "
    "Install the package python3-dev, or the -dev package of that Python.")
endif()

foreach(library torch_cpu c10 torch_python)
  add_library(funcol::lib${library} SHARED IMPORTED)
  set_target_properties(funcol::lib${library} PROPERTIES
    IMPORTED_LOCATION ${torch_lib_dir}/lib${library}.so)
endforeach()

# The headers of an imported target are system headers: their warnings are not ours.
add_library(funcol::torch INTERFACE IMPORTED)
set_target_properties(funcol::torch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${torch_include_dirs}"
  INTERFACE_COMPILE_DEFINITIONS
    "USE_DISTRIBUTED;USE_C10D_GLOO;$<$<COMPILE_LANGUAGE:CXX>:_GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi}>"
  INTERFACE_LINK_LIBRARIES "funcol::libtorch_cpu;funcol::libc10")

add_library(funcol::torch_python INTERFACE IMPORTED)
set_target_properties(funcol::torch_python PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${torch_python_include_dir}"
  INTERFACE_LINK_LIBRARIES "funcol::torch;funcol::libtorch_python")

# NCCL is recorded only: nothing calls it yet.
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${torch_nccl_include_dir})
set(NCCL_VERSION "")
if(NCCL_INCLUDE_DIR)
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h nccl_lines REGEX "#define NCCL_(MAJOR|MINOR|PATCH) ")
  if(nccl_lines MATCHES "NCCL_MAJOR +([0-9]+).*NCCL_MINOR +([0-9]+).*NCCL_PATCH +([0-9]+)")
    set(NCCL_VERSION ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3})
  endif()
endif()
