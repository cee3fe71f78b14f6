#include "fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  funcol::test::Bytes bytes(data, size);
  funcol::test::run(bytes);
  return 0;
}
