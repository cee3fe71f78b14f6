// Nodes of autograd's graph whose gradients Python objects take part in.
//
// Compiled autograd takes such a node as a function that it looks into.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace funcol::python {

// A Python object that a node holds, and which is let go of wherever the node goes.
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
  // Equal objects have the same one.
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

// What a node does to the gradient. Needs the GIL.
class Gradient {
 public:
  Gradient() = default;
  virtual ~Gradient() = default;
  Gradient(const Gradient&) = delete;
  Gradient& operator=(const Gradient&) = delete;

  virtual const char* name() const = 0;
  virtual py::object of(const py::object& gradient) const = 0;
  // What tells this gradient from others of its name.
  virtual std::vector<uint64_t> key() const = 0;
};
using GradientPtr = std::shared_ptr<const Gradient>;

// Whether what is made of `input` now has a gradient.
inline bool is_recorded(const at::Tensor& input) {
  return at::GradMode::is_enabled() && input.requires_grad();
}

// Makes `gradient` lead from `output`, a tensor of Python's, to `input`. Needs the GIL.
void record(const at::Tensor& input, const py::object& output, GradientPtr gradient);

template <typename GradientType, typename... Args>
void record(const at::Tensor& input, const py::object& output, Args&&... args) {
  record(input, output, GradientPtr(std::make_shared<const GradientType>(std::forward<Args>(args)...)));
}

}  // namespace funcol::python
