// A fuzzer.
#pragma once

#include "bytes.h"

namespace funcol::test {

// Runs the fuzz target on one input. Each program defines it once.
void run(Bytes& bytes);

}  // namespace funcol::test
