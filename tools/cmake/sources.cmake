# Which files belong to a target: everything in its folders, so that a new file needs no edit here.
#
# Folders named cuda need the CUDA toolkit: a build without CUDA leaves them out. Folders named dtensors work with
# Python's objects, and belong to a target only by their own name.

function(collect_sources result)
  set(found "")
  foreach(folder ${ARGN})
    file(GLOB_RECURSE in_folder RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS
      ${PROJECT_SOURCE_DIR}/${folder}/*.cpp ${PROJECT_SOURCE_DIR}/${folder}/*.cu)
    if(NOT folder MATCHES "/dtensors$")
      list(FILTER in_folder EXCLUDE REGEX "/dtensors/")
    endif()
    list(APPEND found ${in_folder})
  endforeach()
  if(NOT BUILD_CUDA)
    list(FILTER found EXCLUDE REGEX "/cuda/")
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# set_units(<target>): in a unity build, units of equal size, of 40 files at most. PyTorch's headers take half of a
# unit's time, however many its files; the compiler takes under 2 GB for one.
function(set_units target)
  get_target_property(files ${target} SOURCES)
  list(LENGTH files num_files)
  math(EXPR num_units "(${num_files} + 39) / 40")
  math(EXPR batch_size "(${num_files} + ${num_units} - 1) / ${num_units}")
  set_target_properties(${target} PROPERTIES UNITY_BUILD_BATCH_SIZE ${batch_size})
endfunction()
