#include "dtensor/table_sizes.h"

#include "dtensor/composites.h"
#include "dtensor/decisions.h"
#include "dtensor/holders.h"
#include "dtensor/mesh_changes.h"
#include "dtensor/meshes.h"
#include "dtensor/native_operators.h"
#include "dtensor/redistributions.h"
#include "dtensor/spec_numbers.h"
#include "pyobjects/specs.h"
#include "redistribute/flat_step.h"

namespace funcol::python {

std::map<std::string, size_t> table_sizes() {
  return {
      {"composites", num_composites()},     {"decisions", num_decisions()},
      {"holder_moves", num_holder_moves()}, {"known_meshes", num_known_meshes()},
      {"mesh_changes", num_mesh_changes()}, {"redistributions", num_redistributions()},
      {"served_calls", num_served_calls()}, {"signatures", num_shared_signatures()},
      {"spec_numbers", num_spec_numbers()}, {"specs", num_specs()},
  };
}

}  // namespace funcol::python
