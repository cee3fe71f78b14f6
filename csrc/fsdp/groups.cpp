#include "fsdp/groups.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "async/async_tensor.h"
#include "comm/call_site.h"
#include "compat/process_group.h"
#include "fsdp/gather.h"
#include "fsdp/group_gradients.h"
#include "fsdp/streams.h"
#include "pyobjects/attributes.h"
#include "pyobjects/meshes.h"

namespace funcol::python {
namespace {

py::object mesh_to_gather_over(const Fields& group) {
  return group.is<"_sharded_state">(fully_shard().sharded_post_forward.ptr())
             ? group.get<"post_forward_mesh_info">()
             : group.get<"mesh_info">();
}

}  // namespace

void check_is_current(py::handle mesh_info, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (group && group_moment() > 0) {
    funcol::check_is_current(GroupRef(group, mesh_moment(attribute<"mesh">(mesh_info))), "fully_shard");
  }
}

std::string purpose_of(const Fields& group) {
  if (!purposes_are_wanted()) {
    return {};
  }
  const auto name = group.find<"_module_fqn">();
  return "parameters of " + (name && PyUnicode_Check(name.ptr()) ? name.cast<std::string>() : "the root");
}

namespace {

// A gather that C++ can start.
struct Gather {
  Shards shards;
  py::object process_group;
  c10::intrusive_ptr<c10d::ProcessGroup> c10d_group;
};

// Returns the gather of `group`; returns nullopt if the group is of an uncommon kind.
std::optional<Gather> find_gather(const Fields& group) {
  const auto params = unmodified_params(group.find<"fsdp_params">().ptr(), "FSDPParamGroup.unshard");
  const auto mesh_info = mesh_to_gather_over(group);
  if (!params || !is_sharded_mesh(mesh_info)) {
    return std::nullopt;
  }
  auto process_group = attribute<"shard_process_group">(mesh_info);
  auto c10d_group = group_object(process_group.ptr());
  auto shards = find_shards(*params);
  if (!c10d_group || c10d_group->getSize() == 1 || !shards) {
    return std::nullopt;
  }
  return Gather{*std::move(shards), std::move(process_group), std::move(c10d_group)};
}

void start(const Gather& gather, const Fields& group, py::handle is_async) {
  const auto& [shards, process_group, c10d_group] = gather;
  const auto purpose = purpose_of(group);
  const Label label(purpose);
  const at::NoGradGuard no_grad;
  const Comm comm(group.get<"_all_gather_comm">(), imported<kCollectives, "DefaultAllGather">());
  const Streams streams(group);
  py::object copy_stream = py::none();
  py::object stream = py::none();
  if (streams) {
    const auto both = attribute<"get_all_gather_streams">(group.get<"comm_ctx">())(
        is_async, group.get<"_training_state">());
    copy_stream = both[py::int_(0)];
    stream = both[py::int_(1)];
  }
  py::object output;
  py::object sent;
  {
    const ContextGuard entered(streams.context(copy_stream));
    output =
        comm.allocate(shards.length * c10d_group->getSize(), to_python(shards.dtype), group.get<"device">());
    sent = to_python(copy_in(shards, THPVariable_Unpack(output.ptr()), c10d_group->getRank()));
  }
  streams.wait_for_stream(stream, copy_stream);
  py::object work = py::none();
  py::object event;
  {
    const ContextGuard entered(streams.context(stream));
    if (is_async.is(py::handle(Py_False)) && comm.can_run_own(process_group, output)) {
      comm.run_own("all_gather_into_tensor", process_group, output, sent, [](auto& of, auto& to, auto& from) {
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
  const ListedShards listed(shards);
  const auto result = named_tuple(imported<kCollectives, "AllGatherResult">(), output, event, work,
                                  listed.types, listed.lengths, listed.all_lengths);
  group.set<"_all_gather_result">(result.ptr());
}

// Replaces FSDPParamGroup.unshard. Returns false, with nothing done, if PyTorch's function has to run.
// `is_enabled` means that group_fast_path_is_enabled() is known to be true.
bool unshard(py::handle object, py::handle is_async, bool is_enabled = false) {
  const auto& known = fully_shard();
  if (Py_TYPE(object.ptr()) != known.group) {
    return false;
  }
  const Fields fields(object.ptr());
  if (!fields.is<"_all_gather_result">(Py_None) || fields.is<"_sharded_state">(known.unsharded.ptr()) ||
      (!fields.is_true<"unshard_in_backward">() && is_in_state<"PRE_BACKWARD">(fields))) {
    return true;
  }
  if (group_moment() > 0) {
    const auto mesh_info = mesh_to_gather_over(fields);
    if (is_sharded_mesh(mesh_info)) {
      check_is_current(mesh_info, group_object(attribute<"shard_process_group">(mesh_info).ptr()));
    }
  }
  if (!(is_enabled || group_fast_path_is_enabled()) || !fields.is<"_reshard_after_forward_event">(Py_None)) {
    return false;
  }
  const auto gather = find_gather(fields);
  if (!gather) {
    return false;
  }
  start(*gather, fields, is_async);
  return true;
}

void wait_for_gather(const Streams& streams, const py::object& result, const at::Tensor& buffer) {
  const auto event = attribute<"all_gather_event">(result);
  if (!event.is_none()) {
    streams.wait_for_event(streams.current(), event);
  }
  const auto work = attribute<"all_gather_work">(result);
  if (py::isinstance(work, imported<"torch.distributed.distributed_c10d", "Work">())) {
    call_method<"wait">(work);
  }
  settle(buffer);
}

// Releases the result of the previous gather, which FSDP2 keeps until the next one of a forward pass.
void release_previous_gather(const Streams& streams, const py::object& comm_context) {
  if (streams) {
    call_method<"release_all_gather_state_for_comm_reuse">(comm_context);
  } else {
    set_attribute<"all_gather_state">(comm_context, Py_None);
  }
}

// Orders later gathers after the copies out of this one's buffer: by keeping `result` with an event if
// `is_kept`, else by having their streams wait for the event.
void order_after_copies(const Streams& streams, const py::object& comm_context, const py::object& result,
                        bool is_kept) {
  if (!streams && !is_kept) {
    return;
  }
  const auto event = streams.new_event();
  if (streams) {
    call_method<"record">(event);
  }
  if (is_kept) {
    const auto state = named_tuple(imported<kGroups, "AllGatherState">(), result, event);
    set_attribute<"all_gather_state">(comm_context, state);
  } else {
    call_method<"wait_all_gather_streams_on_event">(comm_context, event);
  }
}

// Replaces FSDPParamGroup.wait_for_unshard, with the arguments and the result of unshard().
bool wait_for_unshard(py::handle object, bool is_enabled = false) {
  if (Py_TYPE(object.ptr()) != fully_shard().group) {
    return false;
  }
  const Fields fields(object.ptr());
  const auto result = fields.get<"_all_gather_result">();
  if (result.is_none()) {
    return true;
  }
  const auto group = is_enabled || group_fast_path_is_enabled()
                         ? unmodified_group(object.ptr(), "FSDPParamGroup.wait_for_unshard")
                         : std::nullopt;
  const auto mesh_info = mesh_to_gather_over(fields);
  if (!group || !is_sharded_mesh(mesh_info) || has_extension(group->params) ||
      !fields.is<"_all_gather_output_fn">(imported<kCollectives, "_default_all_gather_output_fn">().ptr())) {
    return false;
  }
  const auto buffer = attribute<"all_gather_output">(result);
  const auto* const tensor = dense_tensor(buffer);
  const auto process_group = group_object(attribute<"shard_process_group">(mesh_info).ptr());
  if (!process_group || process_group->getSize() == 1 || tensor == nullptr) {
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
  const bool is_kept = is_in_state<"FORWARD">(fields) && attribute<"all_gather_work">(result).is_none();
  if (is_in_state<"FORWARD">(fields)) {
    release_previous_gather(streams, comm_context);
  }
  {
    const at::NoGradGuard no_grad;
    wait_for_gather(streams, result, *tensor);
    gathered.fill();
  }
  for (const auto& param : group->params) {
    if (!param.find<"_unsharded_param">()) {
      call_method<"init_unsharded_param">(param.object());
    }
  }
  to_unsharded(*group);
  order_after_copies(streams, comm_context, result, is_kept);
  fields.set<"_all_gather_result">(Py_None);
  return true;
}

// Calls unshard(), or PyTorch's method if C++ cannot do its work. group_fast_path_is_enabled() must be true,
// as for wait_or_fall_back().
void unshard_or_fall_back(const Fields& group) {
  if (!unshard(group.object(), group.get<"unshard_async_op">(), /*is_enabled=*/true)) {
    call_method<"unshard">(group.object(), group.get<"unshard_async_op">());
  }
}

void wait_or_fall_back(const Fields& group) {
  if (!wait_for_unshard(group.object(), /*is_enabled=*/true)) {
    call_method<"wait_for_unshard">(group.object());
  }
}

// Starts the gather of the group whose forward pass ran before this one's.
void prefetch(const Fields& group) {
  const auto indices = group.get<"_post_forward_indices">();
  if (PyObject_Size(indices.ptr()) == 0) {
    return;  // as in the second of several backward passes
  }
  if (to_int(group.get<"_num_param_groups">().ptr()) > 1) {
    call_method<"_backward_prefetch">(group.object());
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
    if (unmodified_group_fields(before.ptr(), "FSDPParamGroup.pre_backward")) {
      unshard_or_fall_back(target);
    } else {
      call_method<"unshard">(before, target.get<"unshard_async_op">());
    }
  } catch (...) {
    set_state(target, state);
    throw;
  }
  set_state(target, state);
}

}  // namespace

py::object fsdp_pre_forward(py::handle fsdp_group) {
  const auto group = on_group_fast_path<unmodified_group_fields>(fsdp_group, "FSDPParamGroup.pre_forward");
  if (!group) {
    return {};
  }
  const bool is_first = !is_in_state<"FORWARD">(*group);
  set_state(*group, training_state<"FORWARD">());
  unshard_or_fall_back(*group);
  wait_or_fall_back(*group);
  return py::bool_(is_first);
}

py::object fsdp_post_forward(py::handle fsdp_group) {
  const auto group = on_group_fast_path<unmodified_group>(fsdp_group, "FSDPParamGroup.post_forward");
  if (!group || !free_gathered_only(group->params)) {
    return {};
  }
  const auto& fields = group->fields;
  const bool is_in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!is_in_backward) {
    const auto mesh_after = fields.get<"post_forward_mesh_info">();
    const bool is_in_forward = is_in_state<"FORWARD">(fields);
    if (!is_in_forward || fields.is<"mesh_info">(mesh_after.ptr())) {
      to_sharded(*group);
    } else if (!mesh_after.is_none()) {
      call_method<"reshard">(fsdp_group);
    }
    auto order = py::reinterpret_borrow<py::list>(attribute<"post_forward_order">(fields.get<"comm_ctx">()));
    auto indices = py::reinterpret_borrow<py::list>(fields.get<"_post_forward_indices">());
    indices.append(order.size());
    order.append(fsdp_group);
  }
  set_state(fields, training_state<"IDLE">());
  return py::none();
}

py::object fsdp_pre_backward(py::handle fsdp_group, py::handle prefetches) {
  const auto group = on_group_fast_path<unmodified_group_fields>(fsdp_group, "FSDPParamGroup.pre_backward");
  if (!group) {
    return {};
  }
  if (is_in_state<"PRE_BACKWARD">(*group)) {
    return py::none();
  }
  set_state(*group, training_state<"PRE_BACKWARD">());
  unshard_or_fall_back(*group);
  wait_or_fall_back(*group);
  set_gradient_types(*group, /*deferred=*/true);
  if (PyObject_IsTrue(prefetches.ptr()) == 1) {
    prefetch(*group);
  }
  return py::none();
}

py::object fsdp_unshard(py::handle fsdp_group, py::handle is_async) {
  return unshard(fsdp_group, is_async) ? py::none() : py::object();
}

py::object fsdp_wait_for_unshard(py::handle fsdp_group) {
  return wait_for_unshard(fsdp_group) ? py::none() : py::object();
}

}  // namespace funcol::python
