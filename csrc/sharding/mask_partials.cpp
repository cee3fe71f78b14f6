#include "sharding/mask_partials.h"

#include <string_view>

#include "propagation/rule.h"
#include "pyobjects/attributes.h"

namespace funcol::python {

Placement read_cell(py::handle cell, Placement (*read)(py::handle), MaskObjects& masks) {
  if (std::string_view(type_name(cell)) == "_ShardingPlaceholder") {
    return any_shard(attribute<"dim">(cell).cast<int64_t>());
  }
  const auto placement = read(cell);
  if (placement.mask != 0) {
    masks.add(placement.mask, py::reinterpret_borrow<py::object>(cell));
  }
  return placement;
}

}  // namespace funcol::python
