#include "dtensor/spec_numbers.h"

#include <unordered_map>
#include <utility>

#include "pyobjects/attributes.h"
#include "pyobjects/specs.h"

namespace funcol::python {
namespace {

constexpr size_t kMostMet = 32768;

// A hash object that was met, and the number of the specs that keep it. Copies of a spec share the object
// with it; a spec that is written to drops it. It is held, since its address could be another one's later.
struct Met {
  py::object hash;
  uint64_t number = 0;
};

std::unordered_map<PyObject*, Met>& met() {
  static auto* const met = new std::unordered_map<PyObject*, Met>;  // NOLINT: outlives Python
  return *met;
}

// Drops the entries whose specs are gone, and every other one of the rest.
void make_room() {
  bool drop = false;
  std::erase_if(met(), [&](const auto& entry) { return Py_REFCNT(entry.first) == 1 || (drop = !drop); });
}

uint64_t add(PyObject* spec) {
  uint64_t number = 0;
  try {
    number = value_number(spec);
  } catch (const c10::Error&) {
  } catch (const py::error_already_set&) {
  }
  if (number == 0 || PyObject_Hash(spec) == -1) {  // the spec keeps its hash from here on
    PyErr_Clear();
    return 0;
  }
  if (met().size() >= kMostMet) {
    make_room();
  }
  auto hash = find_attribute<"_hash">(spec);
  if (hash && !hash.is_none()) {
    met().emplace(hash.ptr(), Met{hash, number});
  }
  return number;
}

}  // namespace

uint64_t number_of_spec(PyObject* spec) {
  const auto hash = find_attribute<"_hash">(spec);
  const auto found = hash && !hash.is_none() ? met().find(hash.ptr()) : met().end();
  return found != met().end() ? found->second.number : add(spec);
}

void forget_spec_numbers() { const auto gone = std::exchange(met(), {}); }

size_t num_spec_numbers() { return met().size(); }

}  // namespace funcol::python
