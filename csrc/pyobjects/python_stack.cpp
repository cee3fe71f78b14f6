#include "pyobjects/python_stack.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace funcol::python {
namespace {

std::vector<std::string>& library_folders() {
  static auto* const folders = new std::vector<std::string>();  // NOLINT: outlives Python
  return *folders;
}

std::string text_of(PyObject* unicode) {
  const char* const text = PyUnicode_AsUTF8(unicode);
  if (text == nullptr) {
    PyErr_Clear();
    return "?";
  }
  return text;
}

// The code objects from which collectives were started, kept alive, with their lines. Needs the GIL.
class KnownCode {
 public:
  static KnownCode& instance() {
    static auto* const known = new KnownCode();  // NOLINT: outlives Python
    return *known;
  }

  bool is_of_library(PyCodeObject* code) {
    const auto [found, is_new] = codes_.try_emplace(code);
    if (is_new) {
      Py_INCREF(code);
      const auto file = text_of(code->co_filename);
      found->second.is_of_library = std::ranges::any_of(
          library_folders(), [&](const auto& folder) { return file.starts_with(folder); });
    }
    return found->second.is_of_library;
  }

  // Returns the line of `frame`, which runs `code`.
  Text line(PyFrameObject* frame, PyCodeObject* code) {
    auto& text = codes_[code].lines[PyFrame_GetLasti(frame)];
    if (text == nullptr) {
      text = std::make_shared<const std::string>(text_of(code->co_filename) + ":" +
                                                 std::to_string(PyFrame_GetLineNumber(frame)) + " in " +
                                                 text_of(code->co_qualname));
    }
    return text;
  }

  void forget_if_many() {
    constexpr size_t kMost = 4096;
    if (codes_.size() > kMost) {
      forget();
    }
  }

  void forget() {
    for (const auto& [code, known] : std::exchange(codes_, {})) {
      Py_DECREF(code);
    }
  }

 private:
  struct Code {
    bool is_of_library = false;
    std::unordered_map<int, Text> lines;  // by instruction
  };
  std::unordered_map<PyCodeObject*, Code> codes_;
};

template <typename Object>
py::object owned(Object* object) {
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
}

}  // namespace

Text find_caller() {
  if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) {
    return nullptr;
  }
  const py::gil_scoped_acquire gil;
  auto& known = KnownCode::instance();
  known.forget_if_many();
  auto frame = owned(PyThreadState_GetFrame(PyThreadState_Get()));
  while (frame) {
    auto* const of_frame = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = owned(PyFrame_GetCode(of_frame));
    auto* const of_code = reinterpret_cast<PyCodeObject*>(code.ptr());
    if (!known.is_of_library(of_code)) {
      return known.line(of_frame, of_code);
    }
    frame = owned(PyFrame_GetBack(of_frame));
  }
  return nullptr;
}

void set_library_folders(std::vector<std::string> folders) {
  library_folders() = std::move(folders);
  KnownCode::instance().forget();
}

}  // namespace funcol::python
