// What is remembered of DTensors, given up.
#pragma once

namespace funcol::python {

// What depends on process groups, as they come and go: decisions, targets, executions, specs.
void forget();

// What depends on plans alone: targets, executions and plans. For benchmarks.
void forget_redistributions();

}  // namespace funcol::python
