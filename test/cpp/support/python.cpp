#include "support/python.h"

#include <gtest/gtest.h>
#include <pybind11/eval.h>

#include <cstdio>
#include <stdexcept>

#include "pyobjects/callbacks.h"

namespace funcol::test {
namespace {

// The interpreter that CMake was told of, with its environment's packages.
void start_python() {
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  auto status = PyConfig_SetBytesString(&config, &config.executable, PYTHON_EXECUTABLE);
  if (PyStatus_Exception(status) == 0) {
    status = PyConfig_SetBytesString(&config, &config.program_name, PYTHON_EXECUTABLE);
  }
  if (PyStatus_Exception(status) == 0) {
    status = Py_InitializeFromConfig(&config);
  }
  PyConfig_Clear(&config);
  if (PyStatus_Exception(status) != 0) {
    throw std::runtime_error(status.err_msg);
  }
}

py::dict& names() {
  static auto* const dict = new py::dict;  // NOLINT: outlives Python
  return *dict;
}

void load_python_side() {
  py::module::import("sys").attr("path").attr("insert")(0, PYTHON_FOLDER);
  const auto module = py::module::import("python_side");
  names() = module.attr("__dict__").cast<py::dict>();
  for (const auto& [name, function] : module.attr("CALLBACKS").cast<py::dict>()) {
    python::register_callback(name.cast<std::string>(), function.cast<py::object>());
  }
}

}  // namespace

py::object python(const char* expression) { return py::eval(expression, names()); }

py::object python(const char* expression, py::handle x) {
  py::dict local;
  local["x"] = x;
  return py::eval(expression, names(), local);
}

int64_t num_calls(const char* callback) { return names()["num_calls"][callback].cast<int64_t>(); }

}  // namespace funcol::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    funcol::test::start_python();
    funcol::test::load_python_side();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the test's Python does not start: %s\n", error.what());
    return 1;
  }
  const int failed = RUN_ALL_TESTS();
  return Py_FinalizeEx() == 0 ? failed : 1;
}
