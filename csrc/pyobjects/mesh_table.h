// A table of values for DeviceMeshes, each kept for as long as its mesh lives.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace funcol::python {

// Keyed by address. Tables live as long as the process; the GIL is their lock.
template <typename Value>
class MeshTable {
 public:
  // Calls `released` with the value of each mesh that is destroyed.
  explicit MeshTable(void (*released)(const Value&) = nullptr) : released_(released) {}

  // Returns the value of a mesh; null if there is none. Valid while the mesh lives.
  Value* find(py::handle mesh) {
    const auto found = values_.find(mesh.ptr());
    return found == values_.end() ? nullptr : &found->second;
  }

  // Adds a value, or replaces the mesh's earlier one.
  Value& insert_or_assign(py::handle mesh, Value value) {
    auto* const address = mesh.ptr();
    const auto [entry, is_new] = values_.insert_or_assign(address, std::move(value));
    if (is_new) {
      py::weakref(mesh, py::cpp_function([this, address](py::handle reference) {
                    const auto gone = values_.extract(address);
                    reference.dec_ref();
                    if (released_ != nullptr && gone) {
                      released_(gone.mapped());
                    }
                  }))
          .release();
    }
    return entry->second;
  }

  void clear() { values_.clear(); }

  // Returns true if `holds` is true of the value of any mesh.
  template <typename Predicate>
  bool any_of(Predicate holds) const {
    return std::any_of(values_.begin(), values_.end(),
                       [&](const auto& entry) { return holds(entry.second); });
  }

  size_t size() const { return values_.size(); }

 private:
  void (*released_)(const Value&);
  std::unordered_map<PyObject*, Value> values_;
};

}  // namespace funcol::python
