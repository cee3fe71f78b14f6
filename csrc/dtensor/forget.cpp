#include "dtensor/forget.h"

#include "dtensor/decisions.h"
#include "dtensor/holders.h"
#include "dtensor/mesh_changes.h"
#include "dtensor/meshes.h"
#include "dtensor/native_operators.h"
#include "dtensor/redistributions.h"
#include "pyobjects/specs.h"

namespace funcol::python {

void forget() {
  forget_served_calls();
  forget_decisions();
  forget_redistributions();
  forget_mesh_changes();
  forget_holder_moves();
  forget_specs();
}

void forget_mesh_of(const std::string& group) {
  if (is_group_of_mesh(group)) {
    forget();
  }
}

}  // namespace funcol::python
