// The propagation engine as funcol.sharding uses it.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/attributes.h"
#include "bindings/bindings.h"
#include "bindings/mesh_table.h"
#include "bindings/python_layout.h"
#include "bindings/python_op_schema.h"
#include "bindings/python_specs.h"
#include "bindings/spec_methods.h"
#include "bindings/without_gil.h"
#include "layout/hash.h"
#include "layout/shards.h"
#include "planner/lru_cache.h"
#include "sharding/output_metas.h"

namespace funcol::python {
namespace {

constexpr const char* kOp = "propagate_op_sharding";

// What a decision depends on.
struct Key {
  py::object op;  // as Python has it
  OpCall call;
  std::vector<Layout> layouts;
  std::vector<std::optional<Layout>> results;
  py::object mesh;  // the first that equals that of the first tensor; kept, as its address is it
  std::vector<py::object> meshes;  // of all, where they are not all the first one
  std::vector<AxisSet> merged;

  friend bool operator==(const Key& a, const Key& b) {
    return a.op.is(b.op) && a.mesh.is(b.mesh) && a.call == b.call && a.layouts == b.layouts &&
           a.results == b.results && a.merged == b.merged &&
           std::ranges::equal(a.meshes, b.meshes, [](const auto& x, const auto& y) { return x.is(y); });
  }
};

// Of meshes that are equal, the one that was met first: decisions are the same for all of them, and keep but
// one alive, as PyTorch's do.
class EqualMeshes {
 public:
  py::object first(py::handle mesh) {
    const auto* const known = firsts_.find(mesh);
    if (known != nullptr) {
      return py::reinterpret_borrow<py::object>(*known);
    }
    auto* const found = PyDict_SetDefault(kept_.ptr(), mesh.ptr(), mesh.ptr());
    if (found == nullptr) {
      throw py::error_already_set();
    }
    return py::reinterpret_borrow<py::object>(firsts_.put(mesh, found));
  }

  void forget() {
    firsts_.clear();
    const auto gone = std::exchange(kept_, py::dict());
  }

 private:
  py::dict kept_;
  MeshTable<PyObject*> firsts_;
};

EqualMeshes& equal_meshes() {
  static auto* const meshes = new EqualMeshes;  // NOLINT: outlives Python
  return *meshes;
}

void add_argument(Hash& hash, const Argument& argument) {
  hash.add(argument.value.index());
  if (argument.is_list()) {
    hash.add(argument.list().size());
    for (const auto& element : argument.list()) {
      add_argument(hash, element);
    }
  } else if (const auto* integer = std::get_if<int64_t>(&argument.value)) {
    hash.add(static_cast<uint64_t>(*integer));
  } else if (const auto* flag = std::get_if<bool>(&argument.value)) {
    hash.add(*flag ? 1 : 0);
  }
}

struct KeyHash {
  size_t operator()(const Key& key) const {
    Hash hash;
    hash.add(reinterpret_cast<uintptr_t>(key.op.ptr()));
    hash.add(reinterpret_cast<uintptr_t>(key.mesh.ptr()));
    for (const auto& [name, argument] : key.call.args) {
      add_argument(hash, argument);
    }
    for (const auto& meta : key.call.tensors) {
      hash.add_all(meta.shape);
      hash.add_all(meta.stride);
      hash.add(static_cast<uint64_t>(meta.dtype));
    }
    for (const auto& layout : key.layouts) {
      hash.add(layout);
    }
    return hash.value();
  }
};

// An average over ranks is that of the whole only where all ranks hold as much: rules in Python do not ask.
bool averages_are_even(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    const bool averages = std::ranges::any_of(composition.outputs, [&](const auto& output) {
      return output.has_value() && output->placements[axis].is_partial() &&
             output->placements[axis].op == PartialOp::kAvg;
    });
    for (size_t i = 0; averages && i < composition.inputs.size(); ++i) {
      const auto& layout = composition.inputs[i];
      const auto& placement = layout.placements[axis];
      if (placement.is_shard() &&
          !is_cut_evenly(layout, mesh, placement.dim, call.tensors[i].shape[placement.dim])) {
        return false;
      }
    }
  }
  return true;
}

// The number of the same kind and sign that stands for all of them.
void leave_only_sign(Argument& argument) {
  if (auto* const number = std::get_if<double>(&argument.value)) {
    *number = *number > 0 ? 1 : *number < 0 ? -1 : *number;  // 0 and NaN stand for themselves
  } else if (auto* const integer = std::get_if<int64_t>(&argument.value)) {
    *integer = *integer > 0 ? 1 : *integer < 0 ? -1 : 0;
  } else if (auto* const list = std::get_if<Argument::List>(&argument.value)) {
    std::ranges::for_each(*list, leave_only_sign);
  }
}

// Factors: the kind of number decides the dtype of the result, and the sign whether an order is kept. More
// than that no rule in C++ asks of them, and they may be others in every step of a program.
void leave_out_factors(OpCall& call) {
  constexpr std::array<std::string_view, 5> kFactors = {"other", "scalar", "scalars", "alpha", "beta"};
  for (auto& [name, argument] : call.args) {
    if (std::ranges::find(kFactors, name) != kFactors.end()) {
      leave_only_sign(argument);
    }
  }
}

std::vector<std::optional<TensorMeta>> output_metas_of(const OpCall& call) { return output_metas(call); }

// The Python placements that have masks, told by Placement::mask.
class MaskObjects {
 public:
  void add(uint64_t mask, const py::object& placement) { objects_.emplace_back(mask, placement); }

  // Nothing if it is not known.
  py::object find(uint64_t mask) const {
    const auto found =
        std::ranges::find_if(objects_, [mask](const auto& entry) { return entry.first == mask; });
    return found == objects_.end() ? py::object() : found->second;
  }

 private:
  std::vector<std::pair<uint64_t, py::object>> objects_;
};

// One for all placements of a decision that speak of the mask: what fills it is one of them, what applies it
// another.
py::object to_python_mask(const IndexMask& mask) {
  auto* const mask_partial = imported<"torch.distributed.tensor.placement_types", "_MaskPartial">().ptr();
  auto* const size = imported<"torch", "Size">().ptr();
  return py::handle(mask_partial)(py::arg("offset_shape") = py::handle(size)(py::cast(mask.shape)),
                                  py::arg("offset_dim") = mask.dim);
}

class Engine {
 public:
  using Decisions = LruCache<Key, py::object, KeyHash>;

  // `moves_keywords`: whether whoever asks redistributes keyword tensors, too.
  Engine(py::object make_spec, std::optional<CostModel> model, size_t capacity, bool moves_keywords)
      : make_spec_(std::move(make_spec)),
        propagator_(output_metas_of, std::move(model)),
        decisions_(capacity),
        capacity_(capacity),
        moves_keywords_(moves_keywords) {
    engines().insert(this);
  }
  ~Engine() { engines().erase(this); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // All that there are. Under the GIL, as all else here.
  static std::unordered_set<Engine*>& engines() {
    static auto* const engines = new std::unordered_set<Engine*>;  // NOLINT: outlives Python
    return *engines;
  }

  // `rows_of(op_schema)` gives rows for operators without a rule in C++, or None; then
  // `whole(op_schema, remember)` decides. `assemble(op_schema, elements)` makes of decisions what is
  // remembered. Both decide where the schema, or an output, is nothing that C++ has values for.
  py::object propagate(py::handle op_schema, py::handle rows_of, py::handle whole, py::handle assemble,
                       bool remember) {
    PythonSchema schema;
    try {
      schema = read_op_schema(op_schema, moves_keywords_);
    } catch (const c10::NotImplementedError&) {
      return whole(op_schema, remember);
    }
    const bool has_rule = serves(*schema.op);
    Key key;
    if (remember) {
      key = key_of(op_schema, schema, has_rule);
      if (const auto* known = decisions_.get(key)) {
        ++num_hits_;
        return *known;
      }
      ++num_misses_;
    }
    auto decided = decide(op_schema, schema, has_rule, rows_of, whole, assemble);
    if (remember) {
      decisions_.put(std::move(key), decided);
    }
    return decided;
  }

  py::object strategies(py::handle op_schema, py::handle rows_of) {
    const auto schema = read_op_schema(op_schema, moves_keywords_);
    py::list elements;
    for (auto& part : parts_of(schema)) {
      MaskObjects masks;
      const auto rows = rows_for(op_schema, part.schema, serves(*schema.op), rows_of, masks);
      if (!rows.has_value()) {
        return py::none();
      }
      py::list list;
      for (const auto& sharding : propagator_.strategies(part.schema, *rows)) {
        list.append(to_python(schema, part, sharding, masks));
      }
      elements.append(std::move(list));
    }
    return elements;  // NOLINT: no move, pybind11 converts
  }

  // Seconds of a decision in C++ alone, the least of `count`; nothing is remembered from one to the next.
  double time_decision(py::handle op_schema, size_t count) {
    const auto schema = read_op_schema(op_schema, moves_keywords_);
    double best = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < count; ++i) {
      propagator_.forget_costs();
      const auto begin = std::chrono::steady_clock::now();
      for (auto& part : parts_of(schema)) {
        propagator_.propagate(part.schema);
      }
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return best;
  }

  // Rules in C++ no longer serve this operator.
  void leave(const std::string& op) {
    left_.insert(op);
    forget();
  }

  void forget() { decisions_.clear(); }
  Decisions take_decisions() { return std::exchange(decisions_, Decisions(capacity_)); }
  void clear() {
    forget();
    propagator_.forget_costs();
    forget_specs();
    num_hits_ = num_misses_ = 0;
  }
  py::tuple info() const { return py::make_tuple(num_hits_, num_misses_, capacity_, decisions_.size()); }

 private:
  bool serves(const Operator& op) const { return left_.count(op.name) == 0 && find_rule(op.name) != nullptr; }

  static Key key_of(py::handle op_schema, const PythonSchema& schema, bool has_rule) {
    Key key{op_schema.attr("op"),
            schema.call,
            schema.layouts,
            schema.results,
            equal_meshes().first(schema.mesh),
            {},
            to_mesh(schema.mesh).merged};
    for (const auto& tensor : schema.tensors) {
      if (!tensor.mesh.is(schema.mesh)) {
        for (const auto& each : schema.tensors) {
          key.meshes.push_back(equal_meshes().first(each.mesh));
        }
        break;
      }
    }
    if (has_rule) {
      leave_out_factors(key.call);
    }
    return key;
  }

  py::object decide(py::handle op_schema, const PythonSchema& schema, bool has_rule, py::handle rows_of,
                    py::handle whole, py::handle assemble) {
    py::list elements;
    auto parts = parts_of(schema);
    std::unordered_multimap<size_t, size_t> decided;  // parts by their hash: most elements are alike
    for (size_t i = 0; i < parts.size(); ++i) {
      auto& part = parts[i];
      const auto hash = hash_of(part.schema);
      const auto [begin, end] = decided.equal_range(hash);
      const auto same = std::find_if(begin, end, [&](const auto& entry) {
        const auto& other = parts[entry.second];
        return other.mesh.is(part.mesh) && is_same_question(other.schema, part.schema);
      });
      if (same != end) {
        elements.append(with_own_outputs(elements[same->second].cast<py::tuple>()));
        continue;
      }
      MaskObjects masks;
      const auto rows = rows_for(op_schema, part.schema, has_rule, rows_of, masks);
      if (!rows.has_value()) {
        return whole(op_schema, false);
      }
      elements.append(to_python(schema, part, propagator_.propagate(part.schema, *rows), masks));
      decided.emplace(hash, i);
    }
    return assemble(op_schema, elements);
  }

  // The same decision for another element.
  static py::tuple with_own_outputs(const py::tuple& element) {
    py::list outputs;
    for (const auto& output : element[0]) {
      outputs.append(output.is_none() ? py::none() : copy_spec(output));
    }
    return py::make_tuple(std::move(outputs), element[1], element[2], element[3]);
  }

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

  // But for outputs, which are known of those alone that have been decided.
  static bool is_same_question(const OpSchema& a, const OpSchema& b) {
    return a.call.args == b.call.args && a.call.tensors == b.call.tensors && a.layouts == b.layouts &&
           a.stays == b.stays && a.results == b.results;
  }

  // Nothing where there is no one-axis rule, or none that C++ has values for, or where the outputs are not
  // known: operators that depend on data, or that do not run on Meta tensors. Adds the masks that rows in
  // Python have.
  std::optional<Rows> rows_for(py::handle op_schema, OpSchema& schema, bool has_rule, py::handle rows_of,
                               MaskObjects& masks) {
    try {
      schema.call.outputs = output_metas(schema.call);
    } catch (const c10::Error&) {
      return std::nullopt;
    } catch (python_error&) {
      return std::nullopt;
    } catch (py::error_already_set&) {
      return std::nullopt;
    }
    if (has_rule) {
      return (*find_rule(schema.call.op))(schema.call);
    }
    try {
      return python_rows(op_schema, schema, rows_of, masks);
    } catch (const c10::NotImplementedError&) {  // placements with rules of their own
      return std::nullopt;
    }
  }

  // Asks Python for rows: lists of placements, outputs first, then inputs.
  static std::optional<Rows> python_rows(py::handle op_schema, const OpSchema& schema, py::handle rows_of,
                                         MaskObjects& masks) {
    const py::object answer = rows_of(op_schema);
    if (answer.is_none()) {
      return std::nullopt;
    }
    Rows rows;
    rows.is_legal = averages_are_even;
    for (const auto& row : answer) {
      rows.rows.push_back(to_row(row.cast<py::sequence>(), schema.call, masks));
    }
    return rows;
  }

  static Row to_row(const py::sequence& placements, const OpCall& call, MaskObjects& masks) {
    const auto num_inputs = call.tensors.size();
    const auto num_outputs = call.outputs.size();
    TORCH_CHECK_VALUE(placements.size() == num_outputs + num_inputs, "funcol::", kOp, ": a rule of ", call.op,
                      " gave a row of ", placements.size(), " placements. Expected ", num_outputs,
                      " for its outputs and then ", num_inputs, " for its tensor arguments.");
    Row row;
    for (size_t i = 0; i < placements.size(); ++i) {
      const py::object placement = placements[i];
      if (i < num_outputs) {
        row.outputs.push_back(placement.is_none() ? std::nullopt : std::optional(to_entry(placement, masks)));
      } else {
        TORCH_CHECK_VALUE(!placement.is_none(), "funcol::", kOp, ": a rule of ", call.op,
                          " gave no placement for its tensor argument ", i - num_outputs, ".");
        row.inputs.push_back(to_entry(placement, masks));
      }
    }
    return row;
  }

  static Placement to_entry(const py::object& placement, MaskObjects& masks) {
    if (py::str(py::type::of(placement).attr("__name__")).cast<std::string>() == "_ShardingPlaceholder") {
      return any_shard(placement.attr("dim").cast<int64_t>());
    }
    auto entry = to_placement(placement);
    if (entry.mask != 0) {
      masks.add(entry.mask, placement);
    }
    return entry;
  }

  static py::object masked_placement(const PythonSchema& schema, const Placement& placement,
                                     const MaskObjects& masks) {
    if (auto known = masks.find(placement.mask)) {
      return known;
    }
    for (const auto& tensor : schema.tensors) {
      for (const auto& object : tensor.spec.attr("placements")) {
        if (to_placement(object) == placement) {
          return py::reinterpret_borrow<py::object>(object);
        }
      }
    }
    throw std::logic_error("funcol: a mask that no tensor has");
  }

  py::object python_spec(const PythonSchema& schema, const Spec& spec, py::handle mesh,
                         const MaskObjects& masks) const {
    return to_python_spec(spec, mesh, schema.strided_as_order, make_spec_, [&](const Placement& placement) {
      return masked_placement(schema, placement, masks);
    });
  }

  // Made of an input's, if it is the same: most results lie where an input lies.
  py::object output_spec(const PythonSchema& schema, const Part& part, const Spec& output,
                         const MaskObjects& masks) const {
    for (size_t i = 0; i < part.tensors.size(); ++i) {
      const auto& tensor = schema.tensors[part.tensors[i]];
      if (part.schema.layouts[i] == output.layout && part.schema.call.tensors[i] == output.meta &&
          tensor.mesh.is(part.mesh)) {
        return copy_spec(tensor.spec);
      }
    }
    return python_spec(schema, output, part.mesh, masks);
  }

  // (outputs, inputs, costs, needs_redistribute)
  py::tuple to_python(const PythonSchema& schema, const Part& part, const OutputSharding& sharding,
                      MaskObjects masks) const {
    for (size_t number = 0; number < sharding.masks.size(); ++number) {
      masks.add(new_mask(number), to_python_mask(sharding.masks[number]));
    }
    py::list outputs;
    for (const auto& output : sharding.outputs) {
      outputs.append(output.has_value() ? output_spec(schema, part, *output, masks) : py::none());
    }
    py::list inputs;
    for (size_t i = 0; i < sharding.inputs.size(); ++i) {
      const auto& tensor = schema.tensors[part.tensors[i]];
      const bool is_where_it_was = sharding.inputs[i] == part.schema.layouts[i];
      inputs.append(is_where_it_was ? copy_spec(tensor.spec)
                                    : python_spec(schema, {part.schema.call.tensors[i], sharding.inputs[i]},
                                                  part.mesh, masks));
    }
    return py::make_tuple(std::move(outputs), std::move(inputs), py::cast(sharding.costs),
                          sharding.needs_redistribute);
  }

  py::object make_spec_;
  Propagator propagator_;
  Decisions decisions_;
  size_t capacity_;
  bool moves_keywords_;
  size_t num_hits_ = 0;
  size_t num_misses_ = 0;
  std::unordered_set<std::string> left_;
};

// Specs of one tensor as layouts.
class SpecsOfATensor {
 public:
  std::vector<Layout> read(const py::sequence& specs) {
    std::vector<Layout> layouts;
    layouts.reserve(specs.size());
    for (const auto& spec : specs) {
      layouts.push_back(is_of_the_tensor(spec) ? read_layout(spec, meta_, "a tensor") : checked(spec));
    }
    return layouts;
  }

  const Mesh& mesh() const { return to_mesh(mesh_); }
  const TensorMeta& meta() const { return meta_; }
  bool empty() const { return !mesh_; }

 private:
  // As Python's objects, which are mostly the same ones.
  bool is_of_the_tensor(py::handle spec) const {
    if (!mesh_ || !is_spec(spec) || !attribute<"mesh">(spec).is(mesh_)) {
      return false;
    }
    const auto meta = attribute<"tensor_meta">(spec);
    return meta.is(meta_object_) ||
           (PyTuple_Check(meta.ptr()) &&
            PyTuple_GET_SIZE(meta.ptr()) == PyTuple_GET_SIZE(meta_object_.ptr()) &&
            PyTuple_GET_ITEM(meta.ptr(), 2) == PyTuple_GET_ITEM(meta_object_.ptr(), 2) &&
            py::handle(PyTuple_GET_ITEM(meta.ptr(), 0))
                .equal(py::handle(PyTuple_GET_ITEM(meta_object_.ptr(), 0))));
  }

  Layout checked(py::handle spec) {
    auto [meta, layout] = read_spec(spec);
    const auto mesh = attribute<"mesh">(spec);
    if (!mesh_) {
      mesh_ = mesh;
      meta_object_ = attribute<"tensor_meta">(spec);
      meta_ = meta;
    }
    TORCH_CHECK_VALUE(mesh_.equal(mesh) && meta_.shape == meta.shape && meta_.dtype == meta.dtype,
                      "funcol::redistribute_cost_table: specs of different tensors or meshes, ",
                      to_string(meta_), " on ", std::string(py::str(mesh_)), " and ", to_string(meta), " on ",
                      std::string(py::str(mesh)), ". Expected specs of one tensor.");
    return layout;
  }

  py::object mesh_;
  py::object meta_object_;
  TensorMeta meta_;
};

std::vector<std::vector<double>> redistribute_cost_table(const py::sequence& sources,
                                                         const py::sequence& targets,
                                                         const std::optional<CostModel>& model) {
  SpecsOfATensor specs;
  const auto from = specs.read(sources);
  const auto to = specs.read(targets);
  std::vector<std::vector<double>> table(from.size());
  if (specs.empty()) {
    return table;
  }
  const auto mesh = specs.mesh();
  std::vector<double> costs;
  {
    const WithoutGil no_gil;
    costs = redistribution_costs(from, to, specs.meta(), mesh, model.value_or(default_alpha_beta(mesh)));
  }
  for (size_t row = 0; row < from.size(); ++row) {
    const auto begin = costs.begin() + static_cast<std::ptrdiff_t>(row * to.size());
    table[row].assign(begin, begin + static_cast<std::ptrdiff_t>(to.size()));
  }
  return table;
}

}  // namespace

void forget_decisions() {
  equal_meshes().forget();
  std::list<Engine::Decisions> gone;  // after the loop, since an engine may go with them
  for (auto* const engine : Engine::engines()) {
    gone.push_back(engine->take_decisions());
  }
}

void bind_sharding(PyObject* module) {
  auto m = py::reinterpret_borrow<py::module>(module);
  py::register_exception<NoRuleError>(m, "NoRuleError", PyExc_NotImplementedError);
  py::class_<Engine>(m, "PropagationEngine")
      .def(py::init<py::object, std::optional<CostModel>, size_t, bool>(), py::arg("make_spec"),
           py::arg("model"), py::arg("capacity"), py::arg("moves_keywords") = false)
      .def("propagate", &Engine::propagate, py::arg("op_schema"), py::arg("rows_of"), py::arg("whole"),
           py::arg("assemble"), py::arg("remember"))
      .def("strategies", &Engine::strategies, py::arg("op_schema"), py::arg("rows_of"))
      .def("time_decision", &Engine::time_decision, py::arg("op_schema"), py::arg("count"))
      .def("leave", &Engine::leave, py::arg("op"))
      .def("clear", &Engine::clear)
      .def("info", &Engine::info);
  m.def("ops_with_rules", ops_with_rules);
  m.def("copy_spec", copy_spec, py::arg("spec"));
  m.def("spec_methods", spec_methods, py::arg("type"), py::arg("equals"), py::arg("hash"));
  m.def("canonical_spec", canonical_spec, py::arg("spec"));
  m.def(
      "has_rule", [](const std::string& op) { return find_rule(op) != nullptr; }, py::arg("op"));
  m.def("redistribute_cost_table", redistribute_cost_table, py::arg("sources"), py::arg("targets"),
        py::arg("model"));
  m.def("similar_ops", similar_ops, py::arg("op"));
  m.def("is_per_element", is_per_element, py::arg("op"));
}

}  // namespace funcol::python
