# The fuzzers of test/fuzz: fuzz_<folder>, one for each folder there but the corpus. See test/fuzz/README.md.

if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "FUNCOL_FUZZ needs clang's libFuzzer, not ${CMAKE_CXX_COMPILER_ID}: run tools/fuzz.")
endif()

# Whatever is compiled counts what an input reaches. Numbers that are compared are not looked at: inputs are choices,
# whose bytes no comparison sees, and it takes half of the time.
set(fuzz_flags -fsanitize=fuzzer-no-link -fno-sanitize-coverage=trace-cmp)
add_fuzz_support()
foreach(library ${torch_free_libraries} fuzz_support)
  target_compile_options(${library} PRIVATE ${fuzz_flags})
endforeach()
foreach(target ${fuzz_targets})
  add_fuzz_program(fuzz_${target} ${target})
  target_compile_options(fuzz_${target} PRIVATE ${fuzz_flags})
  target_link_options(fuzz_${target} PRIVATE -fsanitize=fuzzer)
endforeach()
