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

// A Python object that a node holds, and that may be destroyed without the GIL.
class Held {
 public:
  explicit Held(py::object object) : object_(std::move(object)) {}
  ~Held() {
    if (Py_IsInitialized() != 0) {
      const py::gil_scoped_acquire gil;
      object_ = py::object();
    } else {
      object_.release();
    }
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  const py::object& operator*() const { return object_; }
  // Returns Python's hash of the object.
  uint64_t hash() const {
    const auto value = PyObject_Hash(object_.ptr());
    if (value == -1) {
      throw py::error_already_set();
    }
    return static_cast<uint64_t>(value);
  }

 private:
  py::object object_;
};

// Returns a shared owner of an object that holds Python objects; the last owner need not hold the GIL. The
// object leaks if Python has exited by then.
template <typename T>
std::shared_ptr<T> destroyed_with_gil(std::unique_ptr<T> object) {
  return {object.release(), [](T* held) {
            if (Py_IsInitialized() != 0) {
              const py::gil_scoped_acquire gil;
              delete held;
            }
          }};
}

// The computation of a node. Needs the GIL.
class Gradient {
 public:
  Gradient() = default;
  virtual ~Gradient() = default;
  Gradient(const Gradient&) = delete;
  Gradient& operator=(const Gradient&) = delete;

  virtual const char* name() const = 0;
  virtual py::object of(const py::object& gradient) const = 0;
  // Returns words that distinguish this gradient from others of its name.
  virtual std::vector<uint64_t> key() const = 0;
};
using GradientPtr = std::shared_ptr<const Gradient>;

// Returns true if autograd records operators on `input`.
inline bool is_recorded(const at::Tensor& input) {
  return at::GradMode::is_enabled() && input.requires_grad();
}

// Makes `gradient` the node between `output`, a Python tensor, and `input`. Needs the GIL.
void record(const at::Tensor& input, const py::object& output, GradientPtr gradient);

template <typename GradientType, typename... Args>
void record(const at::Tensor& input, const py::object& output, Args&&... args) {
  record(input, output, GradientPtr(std::make_shared<const GradientType>(std::forward<Args>(args)...)));
}

}  // namespace funcol::python
