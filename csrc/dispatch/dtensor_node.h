// Autograd nodes that compute gradients with Python objects. Compiled autograd traces through them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace funcol::python {

// Returns a shared owner of an object that holds Python objects; the last owner need not hold the GIL. The
// object leaks if Python has exited by then.
template <typename T>
std::shared_ptr<T> destroyed_with_gil(std::unique_ptr<T> object) {
  return {object.release(), [](T* owned) {
            if (Py_IsInitialized() != 0) {
              const py::gil_scoped_acquire gil;
              delete owned;
            }
          }};
}

// The computation of a node, which may hold Python objects. Needs the GIL.
class BackwardFunction {
 public:
  BackwardFunction() = default;
  virtual ~BackwardFunction() = default;
  BackwardFunction(const BackwardFunction&) = delete;
  BackwardFunction& operator=(const BackwardFunction&) = delete;

  virtual const char* name() const = 0;
  virtual py::object apply(const py::object& gradient) const = 0;
  // Returns words that distinguish this function from others of its name.
  virtual std::vector<uint64_t> key() const = 0;
};
using BackwardFunctionPtr = std::shared_ptr<const BackwardFunction>;

// Returns Python's hash of an object, for BackwardFunction::key().
inline uint64_t hash_word(py::handle object) { return static_cast<uint64_t>(py::hash(object)); }

// Returns true if autograd records operators on `input`.
inline bool is_recorded(const at::Tensor& input) {
  return at::GradMode::is_enabled() && input.requires_grad();
}

// Makes `function` the node between `output`, a Python tensor, and `input`. Needs the GIL.
void record(const at::Tensor& input, const py::object& output, BackwardFunctionPtr function);

template <typename Function, typename... Args>
void record(const at::Tensor& input, const py::object& output, Args&&... args) {
  record(input, output, destroyed_with_gil(std::make_unique<const Function>(std::forward<Args>(args)...)));
}

}  // namespace funcol::python
