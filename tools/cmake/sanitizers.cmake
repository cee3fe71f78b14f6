# FUNCOL_SANITIZE: every target of this build is checked by these sanitizers, and a finding ends the program.
#
# A Python that imports such a build needs the runtime in front of all libraries: tools/test --sanitize preloads it.

if(FUNCOL_SANITIZE)
  # Faster to compile, and stacks of reports keep more frames.
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
  set(sanitizer_flags -fsanitize=${FUNCOL_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  # PyTorch's classes are compiled without: what a pointer to one points to cannot be told from here.
  list(APPEND sanitizer_flags -fno-sanitize=vptr)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${sanitizer_flags};-g1>")
  add_link_options(${sanitizer_flags})
endif()
