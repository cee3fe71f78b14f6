// Empties all caches of DTensors that depend on process groups: decisions, redistributions, specs.
#pragma once

#include <string>

namespace funcol::python {

// To be called with the GIL, as groups come and go.
void forget();

// Where the group of this name is a mesh's. To be called before the group is removed.
void forget_mesh_of(const std::string& group);

}  // namespace funcol::python
