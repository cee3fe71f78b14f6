#include "dtensor/forget.h"

#include "dtensor/decisions.h"
#include "dtensor/targets.h"
#include "pyobjects/specs.h"
#include "redistribute/plan_cache.h"

namespace funcol::python {

void forget() {
  forget_decisions();
  forget_targets();
  forget_executions();
  forget_specs();
}

void forget_redistributions() {
  forget_targets();
  forget_executions();
  forget_plans();
}

}  // namespace funcol::python
