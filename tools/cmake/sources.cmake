# Which files belong to a target: everything in its folders, so that a new file needs no edit here.
#
# A build with CUDA takes *.cu and *_cuda.cpp; a build without takes *_absent.cpp in their place.

function(collect_sources result)
  set(found "")
  foreach(folder ${ARGN})
    file(GLOB_RECURSE in_folder CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cpp)
    list(APPEND found ${in_folder})
    if(BUILD_CUDA)
      file(GLOB_RECURSE in_folder CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cu)
      list(APPEND found ${in_folder})
    endif()
  endforeach()
  if(BUILD_CUDA)
    list(FILTER found EXCLUDE REGEX "_absent\\.cpp$")
  else()
    list(FILTER found EXCLUDE REGEX "_cuda(_test)?\\.cpp$")
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()
