# Which files belong to a target: everything in its folders, so that a new file needs no edit here.
#
# What lies in a folder named cuda needs the CUDA toolkit: a build without CUDA leaves it out.

function(collect_sources result)
  set(found "")
  foreach(folder ${ARGN})
    file(GLOB_RECURSE in_folder RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS
      ${PROJECT_SOURCE_DIR}/${folder}/*.cpp ${PROJECT_SOURCE_DIR}/${folder}/*.cu)
    list(APPEND found ${in_folder})
  endforeach()
  if(NOT BUILD_CUDA)
    list(FILTER found EXCLUDE REGEX "/cuda/")
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()
