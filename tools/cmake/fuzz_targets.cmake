# What test/fuzz has: a folder for each target, and a corpus of inputs for each. Fuzzers and the tests that run the
# kept inputs are made of the same sources.

set(fuzz_targets layout mesh_change planner propagation)

# add_fuzz_program(<program> <target> <further source>...)
function(add_fuzz_program program target)
  collect_sources(sources test/fuzz/${target})
  add_executable(${program} ${sources} test/fuzz/plan_run.cpp test/fuzz/simulated_ranks.cpp ${ARGN})
  target_include_directories(${program} PRIVATE ${PROJECT_SOURCE_DIR}/test/fuzz ${PROJECT_SOURCE_DIR}/test/cpp)
  target_link_libraries(${program} PRIVATE ${torch_free_libraries})
  set_target_properties(${program} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()
