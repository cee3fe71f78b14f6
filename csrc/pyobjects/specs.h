// The fields of a DTensorSpec, and DTensorSpecs made of values: each is made once and remembered, and callers
// get copies.
//
// Programs write to specs, so they never get a remembered one. Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "propagation/propagator.h"
#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/layouts.h"

namespace funcol::python {

struct SpecObjects {
  explicit SpecObjects(py::handle spec)
      : mesh(attribute<"mesh">(spec)),
        placements(attribute<"placements">(spec)),
        order(attribute<"shard_order">(spec)) {}

  Layout read() const { return {to_placements(placements), to_shard_order(order)}; }
  Layout read_with_norms() const;

  py::object mesh;
  py::object placements;
  py::object order;
};

// Returns the result of Python's ==.
bool are_equal(const py::object& one, const py::object& other);

// Returns true if the placements and shard orders of two specs are equal.
bool have_same_layout(py::handle spec, py::handle other);

// Reads the integers of a tuple. Returns false if it is not a tuple, or one of them is a symbol or
// beyond 64 bits.
bool read_ints(py::handle tuple, std::vector<int64_t>& numbers);

// Returns the spec's tensor_meta. Raises ValueError naming `op` if it has none.
py::object meta_of(py::handle spec, const char* op);

// Returns the shape of the full tensor. A symbol becomes the number that it stands for, and adds a guard.
std::vector<int64_t> shape_of(py::handle spec, const char* op);

// A function that finds the Python placement with a mask, by Placement::mask.
using MaskedPlacements = std::function<py::object(const Placement&)>;

// One object for all DTensorSpecs that are equal and on one mesh, while it is kept. It does not keep the mesh
// alive.
struct SharedSpec : std::enable_shared_from_this<SharedSpec> {
  // Makes the shared spec of `spec`, which has this value and is on the mesh of this id.
  SharedSpec(uint64_t mesh_id, const Spec& value, const py::object& spec);
  ~SharedSpec();
  SharedSpec(const SharedSpec&) = delete;
  SharedSpec& operator=(const SharedSpec&) = delete;

  // Returns a new DTensorSpec of this value, for a program.
  py::object on(py::handle mesh) const;
  // Returns the spec without its mesh, one object, which programs must not get.
  py::object canonical() const;

  uint64_t id;  // never reused; its upper bits are the id of the mesh
  Geometry geometry;

 private:
  friend void share_hash(PyObject* spec, const SharedSpec& shared);

  py::object same_layout_;  // a spec without mesh and tensor_meta, one for all of a layout
  py::object meta_;
  // The objects that equal specs keep as their hashes; new ones get the first. Copies of a spec share its
  // object, and a spec that is written to drops it.
  mutable c10::SmallVector<py::object, 1> hashes_;
  mutable py::object canonical_;
};
using SharedSpecPtr = std::shared_ptr<const SharedSpec>;

// The bytes of a DTensorSpec in Python that shares its placements, and of its tensor_meta and hash, as an
// estimate.
constexpr size_t kSpecBytes = 700;

size_t heap_bytes(const SharedSpecPtr& spec);

// Returns the shared spec of a DTensorSpec. Returns null for a spec that C++ does not support: symbolic
// sizes, masks, placements of unknown kinds, no tensor_meta.
SharedSpecPtr shared_spec(PyObject* spec);
// Returns the same as if the spec were on `mesh`.
SharedSpecPtr shared_spec_on(PyObject* spec, py::handle mesh);

// Returns the id of the shared spec; 0 if there is none. If a spec was evicted, an equal one gets another id.
uint64_t id_of_spec(PyObject* spec);

// Returns true if a word is the id of a spec on this mesh. May return true for other words, too.
inline bool is_id_on(uint64_t word, uint64_t mesh_id) { return word >> 40 == mesh_id; }

// Returns a new DTensorSpec that equals `spec`.
py::object copy_spec(py::handle spec);

// Returns a copy to remember, which does not keep the mesh alive, or the copy of that on its mesh.
py::object copy_without_mesh(py::handle spec);
py::object copy_onto(py::handle spec, py::handle mesh);

// Returns a new DTensorSpec of a tensor on `mesh`, made by Python's make_spec or copied from a remembered
// one. `masked` returns placements with masks; specs with masks are not remembered.
py::object to_python_spec(const Spec& spec, py::handle mesh, bool strided_as_order,
                          const MaskedPlacements& masked);

// Returns the spec without its mesh, one object for all equal ones while it is kept, to compare specs by
// identity. Programs must not get it. Raises NotImplementedError for a spec without a shared one.
py::object canonical_spec(py::handle spec);

// Returns the Python placement Replicate().
py::object replicate();

}  // namespace funcol::python
