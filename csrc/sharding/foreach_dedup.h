// Parts of a call that ask the same: most elements of the lists of an optimizer are alike.
#pragma once

#include <cstddef>
#include <optional>
#include <unordered_map>
#include <vector>

#include "layout/hash.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {

class AlikeParts {
 public:
  // `parts` outlive this.
  explicit AlikeParts(const std::vector<Part>& parts) : parts_(parts) {}

  // A part that was added and differs from this one at most in outputs, which only decided parts have.
  std::optional<size_t> added_like(size_t number) const {
    const auto [begin, end] = by_hash_.equal_range(hash_of(parts_[number].schema));
    for (auto entry = begin; entry != end; ++entry) {
      if (ask_alike(parts_[entry->second], parts_[number])) {
        return entry->second;
      }
    }
    return std::nullopt;
  }

  void add(size_t number) { by_hash_.emplace(hash_of(parts_[number].schema), number); }

 private:
  static size_t hash_of(const OpSchema& schema) {
    Hash hash;
    for (const auto& meta : schema.call.tensors) {
      hash.add_all(meta.shape);
    }
    for (const auto& layout : schema.layouts) {
      hash.add(layout);
    }
    return hash.value();
  }

  static bool ask_alike(const Part& a, const Part& b) {
    return a.mesh.is(b.mesh) && a.schema.call.args == b.schema.call.args &&
           a.schema.call.tensors == b.schema.call.tensors && a.schema.layouts == b.schema.layouts &&
           a.schema.stays == b.schema.stays && a.schema.results == b.schema.results;
  }

  const std::vector<Part>& parts_;
  std::unordered_multimap<size_t, size_t> by_hash_;
};

}  // namespace funcol::python
