// The facts that `python -m funcol info` and `python -m funcol run` print.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "kernels/cuda_library.h"
#include "transfer/executor.h"

namespace funcol::python {
namespace {

// Dispatch key -> the funcol ops that have a kernel of their own for it.
std::map<std::string, std::vector<std::string>> registered_kernels() {
  using Key = c10::DispatchKey;
  std::map<std::string, std::vector<std::string>> kernels;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("funcol::")) {
      continue;
    }
    const auto op = c10::Dispatcher::singleton().findOp(name);
    for (const auto key : {Key::CPU, Key::CUDA, Key::Meta, Key::Autograd, Key::CompositeExplicitAutograd}) {
      if (op && op->hasKernelForDispatchKey(key)) {
        kernels[c10::toString(key)].push_back(name.name);
      }
    }
  }
  return kernels;
}

}  // namespace

void bind_info(PyObject* module) {
  auto m = py::reinterpret_borrow<py::module>(module);
  m.def("registered_kernels", registered_kernels);
  m.def("redistribution_counts", [] {
    const auto counts = redistribution_counts();
    return py::make_tuple(counts.number, counts.bytes);
  });
  m.def("why_no_cuda_kernels", kernels::why_no_cuda_kernels);
}

}  // namespace funcol::python
