// What FSDP2 does for a group from one hook to the next, each in one call: see bind_fully_shard.cpp.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include "async/async_tensor.h"
#include "bindings/fast_functions.h"
#include "bindings/fully_shard_gather.h"
#include "bindings/fully_shard_streams.h"
#include "compat/process_group.h"

namespace funcol::python {
namespace {

py::object mesh_to_gather_over(const Fields& group) {
  return group.is<"_sharded_state">(fully_shard().sharded_post_forward.ptr())
             ? group.get<"post_forward_mesh_info">()
             : group.get<"mesh_info">();
}

// FSDPParamGroup.unshard; false, with nothing done, for what is uncommon. `serves` if serves_groups() said so
// just now.
bool unshard(PyObject* object, py::handle is_async, bool serves = false) {
  const auto& known = fully_shard();
  if (Py_TYPE(object) != known.group) {
    return false;
  }
  const Fields fields(object);
  if (!fields.is<"_all_gather_result">(Py_None) || fields.is<"_sharded_state">(known.unsharded.ptr()) ||
      (!fields.is_true<"unshard_in_backward">() && is_in_state<"PRE_BACKWARD">(fields))) {
    return true;
  }
  if (!(serves || serves_groups()) || !fields.is<"_reshard_after_forward_event">(Py_None)) {
    return false;
  }
  const auto params = usual_params(fields.find<"fsdp_params">().ptr());
  if (!params) {
    return false;
  }
  const auto mesh_info = mesh_to_gather_over(fields);
  if (!is_sharded_mesh(mesh_info, /*or_replicated=*/true)) {
    return false;
  }
  const auto process_group = attribute<"shard_process_group">(mesh_info);
  const auto c10d_group = group_object(process_group.ptr());
  const auto shards = find_shards(*params);
  if (!c10d_group || c10d_group->getSize() == 1 || !shards) {
    return false;
  }

  const at::NoGradGuard no_grad;
  const auto device = fields.get<"device">();
  const Comm comm(fields.get<"_all_gather_comm">(), imported<kCollectives, "DefaultAllGather">());
  const Streams streams(fields);
  py::object copy_stream = py::none();
  py::object stream = py::none();
  if (streams) {
    const auto both = attribute<"get_all_gather_streams">(fields.get<"comm_ctx">())(
        is_async, fields.get<"_training_state">());
    copy_stream = both[py::int_(0)];
    stream = both[py::int_(1)];
  }
  py::object output;
  py::object sent;
  {
    const Streams::Entered entered(streams, copy_stream);
    output = comm.allocate(shards->length * c10d_group->getSize(), shards->dtype, device);
    sent = py::reinterpret_steal<py::object>(THPVariable_Wrap(
        copy_in(shards->tensors, shards->lengths, THPVariable_Unpack(output.ptr()), c10d_group->getRank())));
  }
  streams.wait_for_stream(stream, copy_stream);
  py::object work = py::none();
  py::object event;
  {
    const Streams::Entered entered(streams, stream);
    if (is_async.is(py::handle(Py_False)) && comm.starts_own(process_group, output)) {
      comm.start_own(process_group, output, sent, [](auto& of, auto& to, auto& from) {
        c10d::AllgatherOptions options;
        options.asyncOp = false;
        return compat::all_gather_flat(of, to, from, options);
      });
    } else {
      work = comm.object()(py::arg("output_tensor") = output, py::arg("input_tensor") = sent,
                           py::arg("group") = process_group, py::arg("async_op") = is_async);
    }
    event = streams.recorded_event(stream);
  }
  const auto result = imported<kCollectives, "AllGatherResult">()(
      output, event, work, listed_types(*shards), listed_lengths(*shards), all_lengths(*shards));
  fields.set<"_all_gather_result">(result.ptr());
  return true;
}

// FSDPParamGroup.wait_for_unshard, in the same way.
bool wait_for_unshard(PyObject* object, bool serves = false) {
  if (Py_TYPE(object) != fully_shard().group) {
    return false;
  }
  const Fields fields(object);
  const auto result = fields.get<"_all_gather_result">();
  if (result.is_none()) {
    return true;
  }
  const auto group =
      serves || serves_groups()
          ? usual_group<"init_all_gather_outputs", "alloc_all_gather_outputs", "init_unsharded_param",
                        "to_unsharded", "_setattr_on_modules", "_to_unsharded">(object)
          : std::nullopt;
  const auto mesh_info = mesh_to_gather_over(fields);
  if (!group || !is_sharded_mesh(mesh_info, /*or_replicated=*/true) || has_extension(group->params) ||
      !fields.is<"_all_gather_output_fn">(imported<kCollectives, "_default_all_gather_output_fn">().ptr())) {
    return false;
  }
  const auto buffer = attribute<"all_gather_output">(result);
  const auto* const tensor = plain_tensor(buffer.ptr());
  const auto process_group = group_object(attribute<"shard_process_group">(mesh_info).ptr());
  if (!process_group || process_group->getSize() == 1 || tensor == nullptr || !tensor->is_contiguous() ||
      tensor->is_meta()) {
    return false;
  }
  const auto types = attribute<"param_all_gather_input_dtypes">(result);
  const auto lengths = attribute<"param_all_gather_input_numels">(result);
  GatheredTensors gathered(group->params, types.ptr(), lengths.ptr(), *tensor, process_group->getSize());
  if (!gathered.find()) {
    return false;
  }

  const Streams streams(fields);
  const auto comm_context = fields.get<"comm_ctx">();
  const auto work = attribute<"all_gather_work">(result);
  const bool is_in_forward = is_in_state<"FORWARD">(fields);
  if (is_in_forward) {
    if (streams) {
      call_method<"release_all_gather_state_for_comm_reuse">(comm_context);
    } else {
      set_attribute<"all_gather_state">(comm_context.ptr(), Py_None);
    }
  }
  {
    const at::NoGradGuard no_grad;
    const auto event = attribute<"all_gather_event">(result);
    if (!event.is_none()) {
      streams.wait_for_event(streams.current(), event);
    }
    if (py::isinstance(work, imported<"torch.distributed.distributed_c10d", "Work">())) {
      call_method<"wait">(work);
    }
    settle(*tensor);
    gathered.fill();
  }
  for (const auto& param : group->params) {
    if (!param.find<"_unsharded_param">()) {
      call_method<"init_unsharded_param">(py::handle(param.object()));
    }
  }
  to_unsharded(*group);
  const bool is_kept = is_in_forward && work.is_none();
  if (streams || is_kept) {
    const auto event = streams.new_event();
    if (streams) {
      call_method<"record">(event);
    }
    if (is_kept) {
      const auto state = imported<kGroups, "AllGatherState">()(result, event);
      set_attribute<"all_gather_state">(comm_context.ptr(), state.ptr());
    } else {
      call_method<"wait_all_gather_streams_on_event">(comm_context, event);
    }
  }
  fields.set<"_all_gather_result">(Py_None);
  return true;
}

// These call the method where it cannot be done here. serves_groups() has said yes.
void unshard_now(const Fields& group) {
  if (!unshard(group.object(), group.get<"unshard_async_op">(), /*serves=*/true)) {
    call_method<"unshard">(py::handle(group.object()), group.get<"unshard_async_op">());
  }
}

void wait_now(const Fields& group) {
  if (!wait_for_unshard(group.object(), /*serves=*/true)) {
    call_method<"wait_for_unshard">(py::handle(group.object()));
  }
}

// Starts the gather of the group whose forward pass ran before this one's.
void prefetch(const Fields& group) {
  const auto indices = group.get<"_post_forward_indices">();
  if (PyObject_Size(indices.ptr()) == 0) {
    return;  // several backward passes
  }
  if (to_int(group.get<"_num_param_groups">().ptr()) > 1) {
    call_method<"_backward_prefetch">(py::handle(group.object()));
    return;
  }
  const auto index = to_int(call_method<"pop">(indices).ptr());
  if (index <= 0) {
    return;
  }
  const auto order = attribute<"post_forward_order">(group.get<"comm_ctx">());
  const auto before = checked(PySequence_GetItem(order.ptr(), index - 1));
  const Fields target(before.ptr());
  const auto state = target.get<"_training_state">();
  set_state(target, training_state<"PRE_BACKWARD">());
  try {
    if (usual<"unshard">(before.ptr(), fully_shard().group)) {
      unshard_now(target);
    } else {
      call_method<"unshard">(before, target.get<"unshard_async_op">());
    }
  } catch (...) {
    set_state(target, state);
    throw;
  }
  set_state(target, state);
}

// (group): what FSDPParamGroup.pre_forward does to it; True if it had not begun its forward pass.
PyObject* fsdp_pre_forward(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_pre_forward");
  const auto group =
      serves_groups() ? usual<"unshard", "wait_for_unshard">(args[0], fully_shard().group) : std::nullopt;
  if (!group) {
    return not_implemented();
  }
  const bool is_first = !is_in_state<"FORWARD">(*group);
  set_state(*group, training_state<"FORWARD">());
  unshard_now(*group);
  wait_now(*group);
  return PyBool_FromLong(is_first ? 1 : 0);
  END_HANDLE_TH_ERRORS
}

// (group): what FSDPParamGroup.post_forward does to it.
PyObject* fsdp_post_forward(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_post_forward");
  const auto group = serves_groups()
                         ? usual_group<"reshard", "_to_sharded", "_record_post_forward", "to_sharded",
                                       "free_unsharded_param", "_setattr_on_modules">(args[0])
                         : std::nullopt;
  if (!group || !free_gathered_only(group->params)) {
    return not_implemented();
  }
  const auto& fields = group->fields;
  const bool is_in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!is_in_backward) {
    const auto mesh_after = fields.get<"post_forward_mesh_info">();
    const bool is_in_forward = is_in_state<"FORWARD">(fields);
    if (!is_in_forward || fields.is<"mesh_info">(mesh_after.ptr())) {
      to_sharded(*group);
    } else if (!mesh_after.is_none()) {
      call_method<"reshard">(py::handle(args[0]));
    }
    auto order = py::reinterpret_borrow<py::list>(attribute<"post_forward_order">(fields.get<"comm_ctx">()));
    auto indices = py::reinterpret_borrow<py::list>(fields.get<"_post_forward_indices">());
    indices.append(order.size());
    order.append(py::handle(args[0]));
  }
  set_state(fields, training_state<"IDLE">());
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (group, whether to prefetch): FSDPParamGroup.pre_backward.
PyObject* fsdp_pre_backward(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "fsdp_pre_backward");
  const auto group = serves_groups()
                         ? usual<"unshard", "wait_for_unshard", "_set_unsharded_grad_dtypes",
                                 "_backward_prefetch", "_prefetch_unshard">(args[0], fully_shard().group)
                         : std::nullopt;
  if (!group) {
    return not_implemented();
  }
  if (is_in_state<"PRE_BACKWARD">(*group)) {
    Py_RETURN_NONE;
  }
  set_state(*group, training_state<"PRE_BACKWARD">());
  unshard_now(*group);
  wait_now(*group);
  if (PyObject_Size(group->get<"_fsdp_params_with_wider_grad_dtype">().ptr()) != 0) {
    attribute<"_set_unsharded_grad_dtypes">(py::handle(args[0]))(py::arg("defer_upcast") = true);
  }
  if (PyObject_IsTrue(args[1]) == 1) {
    prefetch(*group);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (group, async_op)
PyObject* fsdp_unshard(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "fsdp_unshard");
  if (!unshard(args[0], args[1])) {
    return not_implemented();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (group)
PyObject* fsdp_wait_for_unshard(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_wait_for_unshard");
  if (!wait_for_unshard(args[0])) {
    return not_implemented();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef* group_functions() {
  static PyMethodDef functions[] = {
      fast<fsdp_pre_forward>("fsdp_pre_forward"),           fast<fsdp_post_forward>("fsdp_post_forward"),
      fast<fsdp_pre_backward>("fsdp_pre_backward"),         fast<fsdp_unshard>("fsdp_unshard"),
      fast<fsdp_wait_for_unshard>("fsdp_wait_for_unshard"), {nullptr, nullptr, 0, nullptr}};
  return functions;
}

}  // namespace funcol::python
