// The eager collectives. Each takes its arguments by position and returns pending tensors, or NotImplemented
// where Python has to call the operators that a layer knows (see tensor_argument()).
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_strings.h>

#include "bindings/bindings.h"
#include "bindings/collective_function.h"
#include "comm/agreement.h"
#include "comm/group_ref.h"
#include "comm/process_group.h"
#include "layout/tables.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "pyobjects/arguments.h"
#include "pyobjects/meshes.h"

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

PyObject* set_resolver(PyObject*, PyObject* resolver) {
  set_group_resolver(resolver);
  Py_RETURN_NONE;
}

PyObject* remember(PyObject*, PyObject* enabled) {
  remember_groups(enabled == Py_True);
  forget_groups();
  Py_RETURN_NONE;
}

PyObject* check_agreement_of_ranks(PyObject*, PyObject* begin) {
  check_agreement(begin == Py_True);
  Py_RETURN_NONE;
}

PyObject* forget_found_groups(PyObject*, PyObject*) {
  forget_groups();
  Py_RETURN_NONE;
}

template <void (*note)(const std::string&)>
PyObject* note_name(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  note(THPUtils_unpackString(name));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// These two also empty the caches of DTensors: they keep meshes, and so groups with their threads and
// connections.
void note_removed(const std::string& name) {
  note_group_removed(name);
  forget_mesh_of(name);
}

PyObject* note_all_removed(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  note_all_groups_removed();
  clear_tables();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

void bind_collectives(PyObject* module) {
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
      {"set_group_resolver", set_resolver, METH_O, nullptr},
      {"remember_groups", remember, METH_O, nullptr},
      {"check_agreement", check_agreement_of_ranks, METH_O, nullptr},
      {"forget_groups", forget_found_groups, METH_NOARGS, nullptr},
      {"note_group_added", note_name<note_group_added>, METH_O, nullptr},
      {"note_group_removed", note_name<note_removed>, METH_O, nullptr},
      {"note_all_groups_removed", note_all_removed, METH_NOARGS, nullptr},
      {},
  };
  add_functions(module, functions);
}

}  // namespace funcol::python
