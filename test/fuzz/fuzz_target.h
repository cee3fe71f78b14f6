// A fuzzer.
#pragma once

#include "bytes.h"

namespace funcol::test {

// What the fuzzer does with an input; a program defines it once.
void run(Bytes& bytes);

}  // namespace funcol::test
