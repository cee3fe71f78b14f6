// Empties all caches of DTensors that depend on process groups: decisions, redistributions, specs.
#pragma once

namespace funcol::python {

// To be called with the GIL, as groups come and go.
void forget();

}  // namespace funcol::python
