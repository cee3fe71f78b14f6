# Compiles through ccache if it is installed, unless the caller has chosen a launcher.
#
# Paths below the source tree are hashed relative to it, so that clones share results. ccache accepts precompiled
# headers only with the "sloppiness" below: it then compares their contents, not their times. It learns what a file
# includes from the compiler (CCACHE_DEPEND), and does not preprocess each file once more.

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  foreach(language CXX CUDA)
    if(NOT CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
        CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1
        CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE_PROGRAM})
    endif()
  endforeach()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
  endif()
endif()
