# Targets of test/fuzz: a folder for each, and a corpus of inputs for each. Fuzzers and the tests that run the
# kept inputs are made of the same sources.

set(fuzz_targets layout mesh_change planner propagation)

# Compiles the sources that all fuzzers share, once.
function(add_fuzz_support)
  if(NOT TARGET fuzz_support)
    add_library(fuzz_support OBJECT test/fuzz/fuzz_target.cpp test/fuzz/plan_run.cpp test/fuzz/simulated_ranks.cpp)
    target_include_directories(fuzz_support PUBLIC ${PROJECT_SOURCE_DIR}/test/fuzz ${PROJECT_SOURCE_DIR}/test/cpp)
  endif()
endfunction()

# add_fuzz_program(<program> <target> <further source>...)
function(add_fuzz_program program target)
  add_fuzz_support()
  collect_sources(sources test/fuzz/${target})
  add_executable(${program} ${sources} ${ARGN})
  target_link_libraries(${program} PRIVATE fuzz_support)
  target_link_libraries(${program} PRIVATE ${torch_free_libraries})
  set_target_properties(${program} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()
