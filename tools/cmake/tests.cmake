# test/cpp/<folder>/*_test.cpp become one program a folder, test_<folder>, known to ctest; that of a/b is test_a_b.

find_package(GTest QUIET)
if(NOT GTest_FOUND AND NOT FUNCOL_BUILD_TESTS STREQUAL "AUTO")
  message(FATAL_ERROR "FUNCOL_BUILD_TESTS is on, but GoogleTest was not found: install libgtest-dev.")
endif()
if(NOT GTest_FOUND)
  message(STATUS "funcol: C++ tests left out: GoogleTest (libgtest-dev) was not found")
  return()
endif()

enable_testing()
set(test_timeout 300)
if(FUNCOL_SANITIZE)
  set(test_timeout 1500)
endif()

# All programs of ctest, and nothing that they do not need.
add_custom_target(cpp_tests)

# add_test_program(<folder> <headers> <library>...). Programs that name the same headers share them, parsed once.
function(add_test_program folder headers)
  collect_sources(sources test/cpp/${folder})
  string(REPLACE / _ name ${folder})
  if(NOT sources)
    return()
  endif()
  add_executable(test_${name} ${sources})
  target_link_libraries(test_${name} PRIVATE ${ARGN} GTest::gtest GTest::gtest_main)
  target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/test/cpp)
  # Optimizes the tested code but not its tests: they compile in half the time.
  target_compile_options(test_${name} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O0>")
  get_property(owner GLOBAL PROPERTY owner_of_${headers})
  if(owner)
    target_precompile_headers(test_${name} REUSE_FROM ${owner})
  else()
    target_precompile_headers(test_${name} PRIVATE ${${headers}})
    set_property(GLOBAL PROPERTY owner_of_${headers} test_${name})
  endif()
  set_target_properties(test_${name} PROPERTIES LINKER_LANGUAGE CXX)
  # One process for all of a program's cases: each process that links PyTorch takes a second to start.
  add_test(NAME ${name} COMMAND test_${name} --gtest_brief=1)
  set_tests_properties(${name} PROPERTIES TIMEOUT ${test_timeout} ENVIRONMENT OMP_NUM_THREADS=1)
  add_dependencies(cpp_tests test_${name})
endfunction()

set(test_headers <algorithm> <functional> <string> <vector> <gtest/gtest.h>)
set(torch_test_headers ${test_headers} <ATen/ATen.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp>)
foreach(folder ${torch_free_folders})
  add_test_program(${folder} test_headers ${torch_free_libraries})
endforeach()
# The inputs that fuzzers of these folders have kept.
foreach(target ${fuzz_targets})
  add_fuzz_program(test_fuzz_${target} ${target} test/fuzz/kept_inputs.cpp)
  add_test(NAME fuzz_${target} COMMAND test_fuzz_${target} ${PROJECT_SOURCE_DIR}/test/fuzz/corpus/${target})
  set_tests_properties(fuzz_${target} PROPERTIES TIMEOUT ${test_timeout})
  add_dependencies(cpp_tests test_fuzz_${target})
endforeach()
if(BUILD_CUDA AND TARGET test_kernels)
  target_link_libraries(test_kernels PRIVATE CUDA::cudart)
  add_dependencies(test_kernels funcol_cuda)  # which it loads
endif()
foreach(folder ${torch_folders})
  add_test_program(${folder} torch_test_headers funcol)
endforeach()

# Allows memory that lives until the end: an interpreter, and graphs that known-wrong programs do not destroy.
function(allow_leaks test)
  set_property(TEST ${test} APPEND PROPERTY ENVIRONMENT LSAN_OPTIONS=detect_leaks=0)
endfunction()

# Programs that start an interpreter: main() is theirs, and they are compiled as what they test.
if(torch_python_library)
  set(python_test_headers ${torch_test_headers} <torch/csrc/utils/pybind.h>)
  add_library(test_python OBJECT test/cpp/support/python.cpp)
  target_link_libraries(test_python PUBLIC funcol_python GTest::gtest ${torch_python_library})
  target_include_directories(test_python PRIVATE ${PROJECT_SOURCE_DIR}/test/cpp)
  # Of the file alone: a definition of the target's would part its headers from the programs'.
  set_source_files_properties(test/cpp/support/python.cpp PROPERTIES COMPILE_DEFINITIONS
    "PYTHON_EXECUTABLE=\"${Python_EXECUTABLE}\";PYTHON_FOLDER=\"${PROJECT_SOURCE_DIR}/test/cpp/support\"")
  # Uses the flags of a program's own sources, so that they share the headers.
  set_target_properties(test_python PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(test_python PUBLIC -fPIE -O0 -fvisibility=hidden)
  target_precompile_headers(test_python PRIVATE ${python_test_headers})
  set_property(GLOBAL PROPERTY owner_of_python_test_headers test_python)
  foreach(folder ${python_folders})
    add_test_program(${folder} python_test_headers funcol_python test_python)
    string(REPLACE / _ name ${folder})
    allow_leaks(${name})
  endforeach()
else()
  message(STATUS "funcol: C++ tests of ${python_folders} left out: ${Python_EXECUTABLE} has no shared library "
    "(libpython) that a program could link")
endif()

include(simulated_gpu)
if(SIMULATED_GPU)
  # In every order that the simulation knows.
  add_test_program(simulated_gpu test_headers simulated_collectives simulated_cudart)
  allow_leaks(simulated_gpu)
  foreach(order random last lazy first)
    add_test(NAME simulated_gpu_${order} COMMAND test_simulated_gpu --gtest_brief=1)
    set_tests_properties(simulated_gpu_${order} PROPERTIES TIMEOUT ${test_timeout}
      ENVIRONMENT "SIMULATED_GPU_SEED=1;SIMULATED_GPU_ORDER=${order}")
    allow_leaks(simulated_gpu_${order})
  endforeach()
endif()

find_package(benchmark QUIET)
if(benchmark_FOUND AND EXISTS ${PROJECT_SOURCE_DIR}/tools/bench/bench_layout.cpp)
  add_executable(bench_layout tools/bench/bench_layout.cpp)
  target_link_libraries(bench_layout PRIVATE funcol_kernels benchmark::benchmark)
  set_target_properties(bench_layout PROPERTIES LINKER_LANGUAGE CXX)
endif()
