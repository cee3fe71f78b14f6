// How the fallback of the wake key treats an operator; see wake_fallback.cpp.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace funcol {

enum class OperatorKind : uint8_t {
  kComposite,  // made of other operators: passes through
  kView,       // its results alias its argument and nothing is written: stays pending
  kReader,     // may look at the data: waits
};

// reshape -> kComposite; view, transpose.int, split.Tensor -> kView; add.Tensor, add_.Tensor, item -> kReader
OperatorKind classify(const c10::OperatorHandle& op);

}  // namespace funcol
