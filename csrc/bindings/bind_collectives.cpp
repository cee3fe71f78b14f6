// The eager collectives, in-place collectives and point-to-point calls. Each takes its arguments by position.
// All return NotImplemented if Python has to call the operators that a layer knows (see tensor_argument()),
// and in-place ones also if Python has to call the functional collective. Collectives return pending tensors.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/collective_function.h"
#include "comm/agreement.h"
#include "comm/group_ref.h"
#include "comm/process_group.h"
#include "layout/tables.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/in_place.h"
#include "ops/spmd_types.h"
#include "pyobjects/arguments.h"
#include "pyobjects/checked_types.h"
#include "pyobjects/meshes.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

constexpr CollectiveFunction kAllReduce{
    "all_reduce",
    {},
    start_all_reduce,
    call::all_reduce,
    [](const at::Tensor& input, const c10d::ReduceOp& reduce_op, const GroupPtr& group) {
      check_all_reduce(input, reduce_op, *group, "all_reduce");
    }};

constexpr CollectiveFunction kAllGather{
    "all_gather_tensor",
    {"gather_dim"},
    start_uneven_all_gather,
    call::all_gather_along_dim,
    [](const at::Tensor& input, int64_t dim, const GroupPtr&, at::OptionalIntArrayRef) {
      check_all_gather(input, dim, "all_gather_tensor");
    }};

constexpr CollectiveFunction kReduceScatter{
    "reduce_scatter_tensor",
    {"scatter_dim"},
    start_uneven_reduce_scatter,
    call::reduce_scatter_along_dim,
    [](const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t dim, const GroupPtr& group,
       at::OptionalIntArrayRef split_sizes) {
      if (!split_sizes.has_value()) {
        check_reduce_scatter(input, reduce_op, dim, *group, "reduce_scatter_tensor");
      }
    }};

constexpr CollectiveFunction kAllToAllSingle{
    "all_to_all_single",
    {"output_split_sizes", "input_split_sizes"},
    start_all_to_all,
    call::all_to_all_single,
    [](const at::Tensor& input, at::IntArrayRef output_splits, at::IntArrayRef input_splits,
       const GroupPtr& group) { check_all_to_all(input, output_splits, input_splits, *group); }};

constexpr CollectiveFunction kAllToAll{
    "all_to_all", {"output_split_sizes"}, start_all_to_all_list, call::all_to_all};

constexpr CollectiveFunction kBroadcast{"broadcast",
                                        {"src"},
                                        start_broadcast,
                                        call::broadcast,
                                        [](const at::Tensor&, int64_t source, const GroupPtr& group) {
                                          check_rank(source, *group, "src", "broadcast");
                                        }};

constexpr CollectiveFunction kPermute{"permute_tensor",
                                      {"src_dst"},
                                      start_permute,
                                      call::permute_tensor,
                                      [](const at::Tensor&, at::IntArrayRef destinations,
                                         const GroupPtr& group) { check_permute(destinations, *group); }};

constexpr CollectiveFunction kReduce{
    "reduce",
    {"dst"},
    start_reduce,
    call::reduce,
    [](const at::Tensor&, const c10d::ReduceOp&, int64_t destination, const GroupPtr& group) {
      check_rank(destination, *group, "dst", "reduce");
    }};

constexpr CollectiveFunction kScatter{"scatter", {"src", "scatter_dim"}, start_scatter, call::scatter};

constexpr CollectiveFunction kGather{"gather", {"dst", "gather_dim"}, start_gather, call::gather};

constexpr CollectiveFunction kAllReduceCoalesced{
    "all_reduce_coalesced",
    {},
    start_all_reduce_coalesced,
    call::all_reduce_coalesced,
    [](at::TensorList inputs, const c10d::ReduceOp& reduce_op, const GroupPtr& group) {
      check_all_reduce(inputs, reduce_op, *group, "all_reduce_coalesced");
    }};

std::vector<at::Tensor> gather_coalesced(at::TensorList inputs, const c10::IValue& group) {
  constexpr auto kOp = "all_gather_into_tensor_coalesced";
  check_all_gather(inputs, 0, kOp);
  return call::all_gather_into_tensor_coalesced(inputs, group_from_ivalue(group, kOp)->getSize(), group);
}

constexpr CollectiveFunction kAllGatherCoalesced{
    "all_gather_into_tensor_coalesced", {}, start_all_gather_coalesced, gather_coalesced};

constexpr CollectiveFunction kReduceScatterCoalesced{
    "reduce_scatter_tensor_coalesced",
    {"scatter_dim"},
    start_reduce_scatter_coalesced,
    call::reduce_scatter_along_dims_coalesced,
    [](at::TensorList inputs, const c10d::ReduceOp& reduce_op, at::IntArrayRef dims, const GroupPtr& group) {
      check_reduce_scatter(inputs, reduce_op, dims, *group, "reduce_scatter_tensor_coalesced");
    }};

// In-place collectives return None after they have written into their destinations.

using at::Tensor;
using at::TensorList;

constexpr DirectFunction kAllReduceInto{"all_reduce", {}, all_reduce_into};
constexpr DirectFunction kBroadcastInto{"broadcast", {"src"}, broadcast_into};

constexpr DirectFunction kAllGatherInto{
    "all_gather_tensor", {}, +[](const Tensor& input, const Tensor& out, const GroupPtr& group) {
      return out.defined() && all_gather_into(out, input, group);
    }};

constexpr DirectFunction kReduceScatterInto{
    "reduce_scatter_tensor",
    {},
    +[](const Tensor& input, const Tensor& out, const c10d::ReduceOp& reduce_op, const GroupPtr& group) {
      return out.defined() && reduce_scatter_into(out, input, reduce_op, group);
    }};

constexpr DirectFunction kAllGatherIntoList{
    "all_gather_tensor", {}, +[](const Tensor& input, TensorList outs, const GroupPtr& group) {
      return !outs.empty() && all_gather_into_list(outs, input, group);
    }};

constexpr DirectFunction kReduceScatterListInto{
    "reduce_scatter_tensor",
    {},
    +[](TensorList inputs, const Tensor& out, const c10d::ReduceOp& reduce_op, const GroupPtr& group) {
      return out.defined() && reduce_scatter_list_into(out, inputs, reduce_op, group);
    }};

constexpr DirectFunction kSend{
    "isend",
    {"dst", "tag"},
    +[](const Tensor& tensor, int64_t destination, int64_t tag, const GroupPtr& group) {
      return can_bypass_dispatcher(tensor) ? as_sole_pending(start_send(tensor, destination, tag, group))
                                           : Tensor();
    }};

constexpr DirectFunction kReceive{
    "irecv", {"src", "tag"}, +[](const Tensor& tensor, int64_t source, int64_t tag, const GroupPtr& group) {
      return can_bypass_dispatcher(tensor) ? as_received(start_receive(tensor, source, tag, group), {0})[0]
                                           : Tensor();
    }};

void remember(bool enabled) {
  remember_groups(enabled);
  forget_groups();
}

// Notes the removal and, like note_all_removed(), empties the caches of DTensors: they keep meshes, and so
// groups with their threads and connections.
void note_removed(const std::string& name) {
  note_group_removed(name);
  forget_mesh_of(name);
}

void note_all_removed() {
  note_all_groups_removed();
  clear_tables();
}

// Functions for the package spmd_types: changes of local types, as its collectives make them, and checks of
// types that are remembered. They return NotImplemented if the package's own function has to run.

constexpr auto kChangeLocalType = "change_local_type";

local_types::PlacedType placed_argument(PyObject* type, PyObject* dim) {
  return {static_cast<local_types::Type>(int_argument(type, "type", kChangeLocalType)),
          int_argument(dim, "dim", kChangeLocalType)};
}

// Takes (input, from, from_dim, to, to_dim, group, keeps_input, scatters_dim_first, and dtypes: during and
// after the change, and the same two for the gradient).
PyObject* change_local_type(PyObject*, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 12, kChangeLocalType);
  const auto group = group_object(args[5]);
  if (!THPVariable_Check(args[0]) || group == nullptr || has_function_mode()) {
    return not_implemented();
  }
  const auto input = tensor_argument(args[0], kChangeLocalType);
  if (!input.defined()) {
    return not_implemented();
  }
  const local_types::Change change{
      placed_argument(args[1], args[2]),
      placed_argument(args[3], args[4]),
      {to_optional_dtype(args[8], kChangeLocalType), to_optional_dtype(args[9], kChangeLocalType)},
      {to_optional_dtype(args[10], kChangeLocalType), to_optional_dtype(args[11], kChangeLocalType)},
      /*scatters_dim_first=*/args[7] == Py_True};
  if (!local_types::supports(input, change, *group)) {
    return not_implemented();
  }
  at::Tensor result;
  {
    const WithoutGil no_gil;
    result = local_types::apply_change(input, change, group, /*keeps_input=*/args[6] == Py_True);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

// Takes the fields of TypeChecker, in order. Without arguments, removes the checker.
PyObject* set_checker(PyObject*, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto argument = [&](size_t i) { return py::reinterpret_borrow<py::object>(args[i]); };
  if (count == 0) {
    set_type_checker({});
  } else {
    check_count(count, 7, "set_type_checker");
    set_type_checker(
        {argument(0), argument(1), argument(2), argument(3), argument(4), argument(5), argument(6)});
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

void bind_collectives(py::module m) {
  static PyMethodDef functions[] = {
      fast<collective_function<kAllReduce>>("all_reduce"),
      fast<collective_function<kAllGather>>("all_gather_tensor"),
      fast<collective_function<kReduceScatter>>("reduce_scatter_tensor"),
      fast<collective_function<kAllToAllSingle>>("all_to_all_single"),
      fast<collective_function<kAllToAll>>("all_to_all"),
      fast<collective_function<kBroadcast>>("broadcast"),
      fast<collective_function<kPermute>>("permute_tensor"),
      fast<collective_function<kReduce>>("reduce"),
      fast<collective_function<kScatter>>("scatter"),
      fast<collective_function<kGather>>("gather"),
      fast<collective_function<kAllReduceCoalesced>>("all_reduce_coalesced"),
      fast<collective_function<kAllGatherCoalesced>>("all_gather_into_tensor_coalesced"),
      fast<collective_function<kReduceScatterCoalesced>>("reduce_scatter_tensor_coalesced"),
      fast<collective_function<kAllReduceInto>>("all_reduce_into"),
      fast<collective_function<kBroadcastInto>>("broadcast_into"),
      fast<collective_function<kAllGatherInto>>("all_gather_into"),
      fast<collective_function<kReduceScatterInto>>("reduce_scatter_into"),
      fast<collective_function<kAllGatherIntoList>>("all_gather_into_list"),
      fast<collective_function<kReduceScatterListInto>>("reduce_scatter_list_into"),
      fast<collective_function<kSend>>("isend"),
      fast<collective_function<kReceive>>("irecv"),
      fast<change_local_type>("change_local_type"),
      fast<set_checker>("set_type_checker"),
      forwarded<check_types, "check_types">(),
      forwarded<assert_type, "assert_type">(),
      {},
  };
  add_functions(m, functions);
  m.def("set_group_resolver", [](py::handle resolver) { set_group_resolver(resolver.ptr()); });
  m.def("remember_groups", remember);
  m.def("check_agreement", check_agreement);
  m.def("forget_groups", forget_groups);
  m.def("note_group_added", note_group_added);
  m.def("note_group_removed", note_removed);
  m.def("note_all_groups_removed", note_all_removed);
  m.def("num_checked_types", num_checked_types);
}

}  // namespace funcol::python
