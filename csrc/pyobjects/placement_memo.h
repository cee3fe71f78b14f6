// Placements of many tensors in turn, most of which share one object.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "pyobjects/layouts.h"

namespace funcol::python {

// Reads placements once while the same object comes again and again.
class PlacementMemo {
 public:
  const std::vector<Placement>& read(const py::object& placements) {
    if (!placements.is(object_)) {
      placements_ = to_placements(placements);
      object_ = placements;
    }
    return placements_;
  }

 private:
  py::object object_;
  std::vector<Placement> placements_;
};

}  // namespace funcol::python
