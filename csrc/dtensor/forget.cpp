#include "dtensor/forget.h"

#include "dtensor/decisions.h"
#include "dtensor/holders.h"
#include "dtensor/mesh_changes.h"
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

}  // namespace funcol::python
