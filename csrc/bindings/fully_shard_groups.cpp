// What FSDP2 does for a group from one hook to the next, each in one call: see bind_fully_shard.cpp.
//
// Streams and events are asked for what PyTorch's own functions ask of them, in the same order. The CPU's,
// which are none, are left alone, and so is what Python has between a collective and its process group, unless
// somebody has put something else in its place.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <numeric>

#include "async/async_tensor.h"
#include "bindings/fast_functions.h"
#include "bindings/fully_shard_gather.h"
#include "bindings/fully_shard_gradients.h"
#include "bindings/python_args.h"
#include "bindings/without_gil.h"
#include "compat/process_group.h"

namespace funcol::python {
namespace {

constexpr AttributeName kCollectives("torch.distributed.fsdp._fully_shard._fsdp_collectives");
constexpr AttributeName kGroups("torch.distributed.fsdp._fully_shard._fsdp_param_group");

template <AttributeName name>
py::object call_method(py::handle object) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), interned<name>()));
}

template <AttributeName name>
py::object call_method(py::handle object, py::handle argument) {
  return checked(PyObject_CallMethodOneArg(object.ptr(), interned<name>(), argument.ptr()));
}

template <AttributeName name>
bool is_in_state(const Fields& group) {
  return group.get<"_training_state">().is(attribute<name>(imported<kGroups, "TrainingState">()));
}

// Of a device; nothing is done with the CPU's, and all of them are None.
class Streams {
 public:
  explicit Streams(const Fields& group) : handle_(group.get<"device_handle">()) {
    has_streams_ = !(handle_.is(imported<"torch", "cpu">()) && are_there(fully_shard().streams));
  }

  explicit operator bool() const { return has_streams_; }

  py::object current() const { return has_streams_ ? call_method<"current_stream">(handle_) : py::none(); }

  py::object new_event() const { return call_method<"Event">(handle_); }

  py::object recorded_event(py::handle stream) const {
    return has_streams_ ? call_method<"record_event">(stream) : py::none();
  }

  void wait_for_stream(py::handle stream, py::handle other) const {
    if (has_streams_) {
      call_method<"wait_stream">(stream, other);
    }
  }

  void wait_for_event(py::handle stream, py::handle event) const {
    if (has_streams_) {
      call_method<"wait_event">(stream, event);
    }
  }

  // Work is for `stream` as long as one lives.
  class Entered {
   public:
    Entered(const Streams& streams, py::handle stream) {
      if (streams.has_streams_) {
        context_ = call_method<"stream">(streams.handle_, stream);
        call_method<"__enter__">(context_);
      }
    }
    ~Entered() {
      if (context_) {
        PyObject* const arguments[] = {context_.ptr(), Py_None, Py_None, Py_None};  // NOLINT
        auto* const left = PyObject_VectorcallMethod(interned<"__exit__">(), arguments,  // NOLINT
                                                     4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
        left == nullptr ? PyErr_WriteUnraisable(context_.ptr()) : Py_DECREF(left);
      }
    }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    py::object context_;
  };

 private:
  py::object handle_;
  bool has_streams_ = true;
};

// What allocates for a collective and starts it: FSDP2's own, or what somebody has put in its place.
class Comm {
 public:
  Comm(py::object comm, py::handle own_type) : comm_(std::move(comm)) {
    const auto& pending = imported<"torch.distributed.distributed_c10d", "_world">();
    is_own_ = py::type::handle_of(comm_).is(own_type) && are_there(fully_shard().collectives) &&
              PyObject_Size(attribute<"pg_coalesce_state">(pending).ptr()) == 0;
  }

  py::object allocate(int64_t length, const py::object& dtype, const py::object& device) const {
    if (is_own_) {
      const auto options = at::TensorOptions()
                               .dtype(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type)
                               .device(reinterpret_cast<THPDevice*>(device.ptr())->device);
      return py::reinterpret_steal<py::object>(THPVariable_Wrap(at::empty({length}, options)));
    }
    return attribute<"allocate">(comm_)(py::make_tuple(length), py::arg("dtype") = dtype,
                                        py::arg("device") = device);
  }

  // (group, output, input) -> a c10d Work
  template <typename Start>
  void start_own(py::handle group, py::handle output, py::handle input, const Start& start) const {
    const auto process_group = group_object(group.ptr());
    auto to = THPVariable_Unpack(output.ptr());
    auto from = THPVariable_Unpack(input.ptr());
    const WithoutGil without_gil;
    const auto work = start(*process_group, to, from);
    if (work) {
      work->wait();
    }
  }

  bool starts_own(py::handle group, py::handle tensor) const {
    return is_own_ && group_object(group.ptr()) && !THPVariable_Unpack(tensor.ptr()).is_complex();
  }

  const py::object& object() const { return comm_; }

 private:
  py::object comm_;
  bool is_own_;
};

bool is_sharded_mesh(py::handle mesh_info, bool or_replicated) {
  const auto type = py::type::handle_of(mesh_info);
  return type.is(imported<kGroups, "FSDPMeshInfo">()) ||
         (or_replicated && type.is(imported<kGroups, "HSDPMeshInfo">()));
}

bool serves_groups() { return can_serve() && !at::hasCallbacks(); }

// (group, async_op): FSDPParamGroup.unshard.
PyObject* fsdp_unshard(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2, "fsdp_unshard");
  const auto& known = fully_shard();
  if (Py_TYPE(args[0]) != known.group) {
    return not_implemented();
  }
  const Fields fields(args[0]);
  if (!fields.is<"_all_gather_result">(Py_None) || fields.is<"_sharded_state">(known.unsharded.ptr()) ||
      (!fields.is_true<"unshard_in_backward">() && is_in_state<"PRE_BACKWARD">(fields))) {
    Py_RETURN_NONE;
  }
  const auto group = serves_groups() ? usual_group<"all_gather_inputs">(args[0]) : std::nullopt;
  if (!group || !fields.is<"_reshard_after_forward_event">(Py_None)) {
    return not_implemented();
  }
  const auto mesh_info = fields.is<"_sharded_state">(known.sharded_post_forward.ptr())
                             ? fields.get<"post_forward_mesh_info">()
                             : fields.get<"mesh_info">();
  if (!is_sharded_mesh(mesh_info, /*or_replicated=*/true)) {
    return not_implemented();
  }
  const auto process_group = attribute<"shard_process_group">(mesh_info);
  const auto c10d_group = group_object(process_group.ptr());
  const auto shards = find_shards(group->params);
  if (!c10d_group || c10d_group->getSize() == 1 || !shards) {
    return not_implemented();
  }

  const at::NoGradGuard no_grad;
  const auto is_async = py::handle(args[1]);
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
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (group): FSDPParamGroup.wait_for_unshard.
PyObject* fsdp_wait_for_unshard(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_wait_for_unshard");
  if (Py_TYPE(args[0]) != fully_shard().group) {
    return not_implemented();
  }
  const Fields fields(args[0]);
  const auto result = fields.get<"_all_gather_result">();
  if (result.is_none()) {
    Py_RETURN_NONE;
  }
  const auto group =
      serves_groups()
          ? usual_group<"init_all_gather_outputs", "alloc_all_gather_outputs", "init_unsharded_param",
                        "to_unsharded", "_setattr_on_modules", "_to_unsharded">(args[0])
          : std::nullopt;
  if (!group || !fields.is<"_all_gather_output_fn">(
                    imported<kCollectives, "_default_all_gather_output_fn">().ptr())) {
    return not_implemented();
  }
  const auto buffer = attribute<"all_gather_output">(result);
  const auto* const tensor = plain_tensor(buffer.ptr());
  const auto process_group =
      group_object(attribute<"_all_gather_process_group">(py::handle(args[0])).ptr());
  if (!process_group || process_group->getSize() == 1 || tensor == nullptr || !tensor->is_contiguous() ||
      tensor->is_meta()) {
    return not_implemented();
  }
  const auto types = attribute<"param_all_gather_input_dtypes">(result);
  const auto lengths = attribute<"param_all_gather_input_numels">(result);
  GatheredTensors gathered(group->params, types.ptr(), lengths.ptr(), *tensor, process_group->getSize());
  if (!gathered.find()) {
    return not_implemented();
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
    const auto local = attribute<"_local_tensor">(param.get<"sharded_param">());
    if (!param.find<"_unsharded_param">() || find_attribute<"fsdp_post_all_gather">(local)) {
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
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The reduction of a group's gradients as FSDP2 does it over one process group.
class Reduction {
 public:
  Reduction(const Group& group, c10::intrusive_ptr<c10d::ProcessGroup> c10d_group, py::object process_group)
      : group_(group),
        fields_(group.fields),
        c10d_group_(std::move(c10d_group)),
        process_group_(std::move(process_group)),
        streams_(fields_),
        comm_(fields_.get<"_reduce_scatter_comm">(), imported<kCollectives, "DefaultReduceScatter">()) {}

  // Lets go of inputs of reductions before, but for the number that may stay.
  void recycle() const {
    const auto context = fields_.get<"comm_ctx">();
    const auto states = py::reinterpret_borrow<py::list>(attribute<"reduce_scatter_states">(context));
    const auto num_kept = to_int(attribute<"reduce_scatter_max_input_buffers">(context).ptr());
    if (to_int(fields_.get<"_param_group_index">().ptr()) !=
        to_int(fields_.get<"_num_param_groups">().ptr()) - 1) {
      return;
    }
    while (static_cast<int64_t>(states.size()) >= num_kept) {
      const auto oldest = attribute<"pop">(states)(0);
      const auto event = attribute<"event">(oldest);
      if (event.is_none()) {
        continue;
      }
      const auto allocated_on = attribute<"allocation_stream">(oldest);
      streams_.wait_for_event(allocated_on, event);
      const auto current = streams_.current();
      if (streams_ && current.not_equal(allocated_on)) {
        streams_.wait_for_event(current, event);
      }
    }
  }

  void run(Gradients taken) const {
    if (!fields_.is<"_post_reduce_event">(Py_None) || !fields_.is<"_all_reduce_state">(Py_None)) {
      call_method<"_wait_for_post_backward">(py::handle(fields_.object()));
    }
    auto dtype = fields_.get<"_reduce_dtype">();
    if (dtype.is_none()) {
      dtype = attribute<"_get_reduce_dtype">(py::handle(fields_.object()))(taken.params, taken.tensors);
    }
    const at::NoGradGuard no_grad;
    const auto num_ranks = c10d_group_->getSize();
    const auto device = fields_.get<"device">();
    const auto factors = imported<kCollectives, "_get_gradient_divide_factors">()(
        process_group_, py::none(), dtype, attribute<"type">(device),
        fields_.get<"gradient_divide_factor">(), fields_.get<"force_sum_reduction_for_comms">());
    const auto context = fields_.get<"comm_ctx">();
    const auto stream = attribute<"reduce_scatter_stream">(context);
    const auto current = streams_.current();
    std::vector<int64_t> lengths;  // of what each rank gets
    for (const auto gradient : taken.tensors) {
      lengths.push_back(padded_length(THPVariable_Unpack(gradient.ptr()), num_ranks) / num_ranks);
    }
    const auto length = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    const auto input = comm_.allocate(length * num_ranks, dtype, device);
    lay_out(taken.tensors, input);
    taken.tensors = py::list();
    streams_.wait_for_stream(stream, current);
    py::object output;
    py::object input_event;
    {
      const Streams::Entered entered(streams_, stream);
      output = comm_.allocate(length, dtype, device);
      divide(input, factors[py::int_(0)]);
      reduce_scatter(output, input, factors[py::int_(2)]);
      input_event = streams_.recorded_event(stream);
    }
    py::object event;
    {
      const Streams::Entered entered(streams_, stream);
      divide(output, factors[py::int_(1)]);
      record_consumer(output, current);
      hand_out(taken.params, output, lengths, current);
      event = streams_.recorded_event(stream);
    }
    fields_.set<"_post_reduce_event">(event.ptr());
    fields_.set<"_partial_reduce_output">(Py_None);
    if (PyObject_SetItem(attribute<"_last_post_reduce_events">(context).ptr(), stream.ptr(), event.ptr()) != 0) {
      throw py::error_already_set();
    }
    const auto state = imported<kGroups, "ReduceScatterState">()(
        input, input_event, call_method<"current_stream">(fields_.get<"device_handle">()),
        py::handle(fields_.object()));
    py::reinterpret_borrow<py::list>(attribute<"reduce_scatter_states">(context)).append(state);
  }

 private:
  void lay_out(const py::list& gradients, const py::object& input) const {
    const auto& buffer = THPVariable_Unpack(input.ptr());
    const auto plain = is_small_on_cpu(buffer) && plain_tensor(input.ptr()) != nullptr
                           ? plain_gradients(gradients, buffer.scalar_type(), c10d_group_->getSize())
                           : std::nullopt;
    if (plain) {
      copy_gradients_in(*plain, buffer, c10d_group_->getSize());
    } else {
      imported<kCollectives, "foreach_reduce_scatter_copy_in">()(gradients, input, c10d_group_->getSize());
    }
  }

  static void divide(const py::object& tensor, const py::object& factor) {
    if (!factor.is_none()) {
      imported<kCollectives, "_div_if_needed">()(tensor, factor);
    }
  }

  void reduce_scatter(const py::object& output, const py::object& input, const py::object& op) const {
    if (comm_.starts_own(process_group_, output)) {
      const auto reduce_op = reduce_op_argument(op.ptr(), "fully_shard");
      comm_.start_own(process_group_, output, input, [&](auto& of, auto& to, auto& from) {
        c10d::ReduceScatterOptions options;
        options.reduceOp = reduce_op;
        options.asyncOp = false;
        return compat::reduce_scatter_flat(of, to, from, options);
      });
    } else {
      comm_.object()(py::arg("output_tensor") = output, py::arg("input_tensor") = input,
                     py::arg("group") = process_group_, py::arg("op") = op);
    }
  }

  static void record_consumer(const py::object& output, const py::object& stream) {
    if (!THPVariable_Unpack(output.ptr()).is_cpu()) {
      imported<kCollectives, "record_grad_output_stream">()(output, stream);
    }
  }

  static void hand_out(const py::list& params, py::object output, const std::vector<int64_t>& lengths,
                       const py::object& stream) {
    Params fields;
    for (const auto param : params) {
      fields.emplace_back(param.ptr());
    }
    const auto dtype = gradient_type(fields);
    if (!dtype.is_none() && reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type !=
                                THPVariable_Unpack(output.ptr()).scalar_type()) {
      output = attribute<"to">(output)(dtype);
      record_consumer(output, stream);
    }
    accumulate(THPVariable_Unpack(output.ptr()), fields, lengths);
  }

  const Group& group_;
  const Fields& fields_;
  c10::intrusive_ptr<c10d::ProcessGroup> c10d_group_;
  py::object process_group_;
  Streams streams_;
  Comm comm_;
};

// Whether the group's gradients are reduced over one process group, and nothing else is done with them.
bool reduces_as_usual(const Group& group) {
  const auto& fields = group.fields;
  const auto modules = fields.get<"modules">();
  return fields.is<"reduce_grads">(Py_True) && fields.is<"_all_reduce_hook">(Py_None) &&
         fields.is<"_all_reduce_hook_stream">(Py_None) && fields.is<"_partial_reduce_output">(Py_None) &&
         fields.is<"reduce_scatter_unused_params">(Py_False) &&
         fields.is<"_prepare_reduce_scatter_inputs">(
             imported<kCollectives, "_default_reduce_scatter_input_fn">().ptr()) &&
         PyObject_Size(fields.get<"_fsdp_params_with_wider_grad_dtype">().ptr()) == 0 &&
         !(PyObject_Size(modules.ptr()) > 1 && is_in_state<"FORWARD">(fields)) && gradient_type(group.params) &&
         std::all_of(group.params.begin(), group.params.end(), is_cut_along_dim_0);
}

// (group): FSDPParamGroup.post_backward.
PyObject* fsdp_post_backward(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1, "fsdp_post_backward");
  const auto group =
      serves_groups()
          ? usual_group<"reshard", "_to_sharded", "_take_unsharded_grads_to_reduce",
                        "_get_unsharded_grad_to_reduce", "_get_grad_inner_tensor", "to_sharded",
                        "free_unsharded_param", "_setattr_on_modules", "to_sharded_dtensor">(args[0])
          : std::nullopt;
  if (!group || !reduces_as_usual(*group)) {
    return not_implemented();
  }
  const auto mesh_info = group->fields.get<"mesh_info">();
  if (!is_sharded_mesh(mesh_info, /*or_replicated=*/false)) {
    return not_implemented();
  }
  auto process_group = attribute<"reduce_scatter_process_group">(mesh_info);
  if (process_group.is_none()) {
    process_group = attribute<"shard_process_group">(mesh_info);
  }
  auto c10d_group = group_object(process_group.ptr());
  if (!c10d_group || c10d_group->getSize() == 1) {
    return not_implemented();
  }

  group->fields.set<"_training_state">(
      attribute<"POST_BACKWARD">(imported<kGroups, "TrainingState">()).ptr());
  group->fields.set<"_post_backward_pending">(Py_False);
  auto taken = take_gradients(*group);
  TORCH_INTERNAL_ASSERT(taken);
  if (group->fields.is_true<"reshard_after_backward">()) {
    to_sharded(*group);
  }
  const Reduction reduction(*group, std::move(c10d_group), std::move(process_group));
  reduction.recycle();
  if (!taken->tensors.empty()) {
    reduction.run(*std::move(taken));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef* group_functions() {
  static PyMethodDef functions[] = {fast<fsdp_unshard>("fsdp_unshard"),
                                    fast<fsdp_wait_for_unshard>("fsdp_wait_for_unshard"),
                                    fast<fsdp_post_backward>("fsdp_post_backward"),
                                    {nullptr, nullptr, 0, nullptr}};
  return functions;
}

}  // namespace funcol::python
