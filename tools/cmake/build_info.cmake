# Writes _build_info.py into the build folder, to be installed beside the libraries.

function(python_literal value result)
  if(value STREQUAL "")
    set(${result} None PARENT_SCOPE)
  else()
    set(${result} "\"${value}\"" PARENT_SCOPE)
  endif()
endfunction()

python_literal("${CUDA_TOOLKIT}" build_info_cuda_toolkit)
python_literal("${NCCL_VERSION}" build_info_nccl)
if(BUILD_CUDA)
  set(build_info_cuda True)
else()
  set(build_info_cuda False)
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/build_info.py.in _build_info.py @ONLY)
