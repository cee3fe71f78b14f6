// What runs between a collective's end and the first use of its result.
#pragma once

#include <functional>
#include <utility>

#include "ops/wire.h"

namespace funcol {

// `fill` writes the result from what was received, on the stream that is current when the epilogue runs.
template <typename Fill>
std::function<void()> as_epilogue(Fill fill) {
  return [fill = std::move(fill)] {
    const BelowAutograd below;
    fill();
  };
}

}  // namespace funcol
