#include "python_frames.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

// Weak, since a program without Python has none of them; declared here, since objects of Python are only
// passed on.
extern "C" {
struct SimulatedGpuPython;  // any object
using PythonObject = SimulatedGpuPython*;
[[gnu::weak]] int Py_IsInitialized();
[[gnu::weak]] int Py_IsFinalizing();   // since 3.13; before:
[[gnu::weak]] int _Py_IsFinalizing();  // NOLINT(bugprone-reserved-identifier)
[[gnu::weak]] void* PyGILState_GetThisThreadState();
[[gnu::weak]] int PyGILState_Ensure();
[[gnu::weak]] void PyGILState_Release(int state);
[[gnu::weak]] PythonObject PyEval_GetFrame();  // borrowed
[[gnu::weak]] PythonObject PyFrame_GetBack(PythonObject frame);
[[gnu::weak]] PythonObject PyFrame_GetCode(PythonObject frame);
[[gnu::weak]] int PyFrame_GetLasti(PythonObject frame);
[[gnu::weak]] int PyFrame_GetLineNumber(PythonObject frame);
[[gnu::weak]] PythonObject PyObject_GetAttrString(PythonObject object, const char* name);
[[gnu::weak]] const char* PyUnicode_AsUTF8(PythonObject text);
[[gnu::weak]] void PyErr_Clear();
[[gnu::weak]] void Py_IncRef(PythonObject object);
[[gnu::weak]] void Py_DecRef(PythonObject object);
}

namespace simulated_gpu::aten {
namespace {

struct Drop {
  void operator()(PythonObject object) const { Py_DecRef(object); }
};
using Owned = std::unique_ptr<SimulatedGpuPython, Drop>;

class HeldLock {
 public:
  HeldLock() : state_(PyGILState_Ensure()) {}
  ~HeldLock() { PyGILState_Release(state_); }
  HeldLock(const HeldLock&) = delete;
  HeldLock& operator=(const HeldLock&) = delete;

 private:
  int state_;
};

bool is_ending() {
  if (Py_IsFinalizing != nullptr) {
    return Py_IsFinalizing() != 0;
  }
  return _Py_IsFinalizing == nullptr || _Py_IsFinalizing() != 0;
}

// A thread that asks for the GIL while the interpreter ends never returns.
bool may_ask() {
  return Py_IsInitialized != nullptr && Py_IsInitialized() != 0 && PyFrame_GetLasti != nullptr &&
         !is_ending() && PyGILState_GetThisThreadState() != nullptr;
}

std::string text_of(PythonObject object, const char* attribute) {
  const Owned value(PyObject_GetAttrString(object, attribute));
  const char* const text = value != nullptr ? PyUnicode_AsUTF8(value.get()) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
  }
  return text != nullptr ? text : "?";
}

// The line of where the frame is now. What is described stays alive, so that its address names it for good.
const std::string* describe_frame(PythonObject frame) {
  using Instruction = std::pair<PythonObject, int>;  // code, and the place in it
  static auto* const mutex = new std::mutex();
  static auto* const lines = new std::map<Instruction, std::string>();

  Owned code(PyFrame_GetCode(frame));
  const Instruction instruction(code.get(), PyFrame_GetLasti(frame));
  {
    const std::scoped_lock lock(*mutex);
    if (const auto known = lines->find(instruction); known != lines->end()) {
      return &known->second;
    }
  }
  std::string line = "File \"" + text_of(code.get(), "co_filename") + "\", line " +
                     std::to_string(PyFrame_GetLineNumber(frame)) + ", in " + text_of(code.get(), "co_name");
  const std::scoped_lock lock(*mutex);
  const auto [described, is_new] = lines->emplace(instruction, std::move(line));
  if (is_new) {
    code.release();  // NOLINT(bugprone-unused-return-value)
  }
  return &described->second;
}

}  // namespace

std::vector<const std::string*> python_frames() {
  constexpr size_t kMaxFrames = 40;
  std::vector<const std::string*> lines;
  if (!may_ask()) {
    return lines;
  }
  const HeldLock lock;
  Owned frame(PyEval_GetFrame());
  if (frame != nullptr) {
    Py_IncRef(frame.get());
  }
  while (frame != nullptr && lines.size() < kMaxFrames) {
    lines.push_back(describe_frame(frame.get()));
    frame.reset(PyFrame_GetBack(frame.get()));
  }
  return lines;
}

}  // namespace simulated_gpu::aten
