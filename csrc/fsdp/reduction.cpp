// The reduction of a group's gradients after its backward pass: fsdp_post_backward() of fsdp/groups.h.
#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "comm/call_site.h"
#include "compat/process_group.h"
#include "fsdp/gather.h"
#include "fsdp/group_gradients.h"
#include "fsdp/groups.h"
#include "fsdp/streams.h"
#include "pyobjects/attributes.h"

namespace funcol::python {
namespace {

struct ProcessGroup {
  py::object object;
  c10::intrusive_ptr<c10d::ProcessGroup> c10d;
};

// The reduction of a group's gradients: a reduce_scatter over the ranks that share the parameters, then an
// all_reduce over the replicas if there are some.
class Reduction {
 public:
  Reduction(const Group& group, ProcessGroup shards, ProcessGroup replicas)
      : fields_(group.fields),
        shards_(std::move(shards)),
        replicas_(std::move(replicas)),
        streams_(fields_),
        comm_(fields_.get<"_reduce_scatter_comm">(), imported<kCollectives, "DefaultReduceScatter">()) {}

  // Releases the inputs of earlier reductions, except for as many as FSDP2 keeps.
  void release_earlier_inputs() const {
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
    wait_for_previous();
    auto dtype = fields_.get<"_reduce_dtype">();
    if (dtype.is_none()) {
      dtype = common_accumulated_type(taken);
    }
    if (!dtype) {
      dtype = attribute<"_get_reduce_dtype">(fields_.object())(taken.params, taken.tensors);
    }
    const at::NoGradGuard no_grad;
    const auto num_ranks = shards_.c10d->getSize();
    const auto device = fields_.get<"device">();
    const auto factors = find_factors(dtype, device);
    const auto context = fields_.get<"comm_ctx">();
    auto stream = attribute<"reduce_scatter_stream">(context);
    if (replicas_.c10d) {
      const ContextGuard entered(
          streams_.context(stream));  // where PyTorch's function casts earlier partial sums
    }
    const auto current = streams_.current();
    std::vector<int64_t> lengths;  // of one rank's parts
    for (const auto gradient : taken.tensors) {
      lengths.push_back(padded_length(THPVariable_Unpack(gradient.ptr()), num_ranks) / num_ranks);
    }
    const auto length = c10::sum_integers(lengths);
    const auto input = comm_.allocate(length * num_ranks, dtype, device);
    // The input may be any tensor if a program's own comm has allocated it.
    if (!try_copy_gradients_in(taken.tensors, input, num_ranks)) {
      imported<kCollectives, "foreach_reduce_scatter_copy_in">()(taken.tensors, input, num_ranks);
    }
    taken.tensors = py::list();
    streams_.wait_for_stream(stream, current);
    py::object output;
    py::object input_event;
    {
      const ContextGuard entered(streams_.context(stream));
      output = comm_.allocate(length, dtype, device);
      divide(input, factors.before);
      reduce_scatter(output, input, factors.reduce_scatter);
      input_event = streams_.recorded_event(stream);
    }
    if (replicas_.c10d) {
      const auto all_reduce_stream = attribute<"all_reduce_stream">(context);
      streams_.wait_for_stream(all_reduce_stream, stream);
      stream = all_reduce_stream;
      const ContextGuard entered(streams_.context(stream));
      all_reduce(output, factors.all_reduce);
      // Keeps the memory from the reduction of the next group.
      fields_.set<"_all_reduce_state">(
          named_tuple(imported<kGroups, "AllReduceState">(), output, streams_.recorded_event(stream)).ptr());
    }
    py::object event;
    {
      const ContextGuard entered(streams_.context(stream));
      divide(output, factors.after);
      record_consumer(output, current);
      cast_and_accumulate(taken.params, THPVariable_Unpack(output.ptr()), lengths, current, stream);
      event = streams_.recorded_event(stream);
    }
    fields_.set<"_post_reduce_event">(event.ptr());
    fields_.set<"_partial_reduce_output">(Py_None);
    if (PyObject_SetItem(attribute<"_last_post_reduce_events">(context).ptr(), stream.ptr(), event.ptr()) !=
        0) {
      throw py::error_already_set();
    }
    const auto state =
        named_tuple(imported<kGroups, "ReduceScatterState">(), input, input_event,
                    call_method<"current_stream">(fields_.get<"device_handle">()), fields_.object());
    py::reinterpret_borrow<py::list>(attribute<"reduce_scatter_states">(context)).append(state);
  }

 private:
  // The factors by which the gradients are divided, and the reduce operators, which may divide as well.
  struct Factors {
    py::object before = py::none();
    py::object after = py::none();
    py::object reduce_scatter;
    py::object all_reduce;
  };

  // Waits for the previous reduction. PyTorch counterpart: FSDPParamGroup._wait_for_post_backward.
  void wait_for_previous() const {
    const auto wait = [&](const py::object& event) {
      if (!event.is_none()) {
        streams_.wait_for_event(streams_.current(), event);
      }
    };
    wait(fields_.get<"_post_reduce_event">());
    fields_.set<"_post_reduce_event">(Py_None);
    if (const auto state = fields_.get<"_all_reduce_state">(); !state.is_none()) {
      wait(attribute<"event">(state));
      fields_.set<"_all_reduce_state">(Py_None);
    }
  }

  // Returns no factors for averages; PyTorch's function chooses all others.
  Factors find_factors(const py::object& dtype, const py::object& device) const {
    const auto type = to_dtype(dtype);
    const bool averages = (type == at::kFloat || type == at::kBFloat16) &&
                          fields_.is<"gradient_divide_factor">(Py_None) &&
                          fields_.is<"force_sum_reduction_for_comms">(Py_False) &&
                          reinterpret_cast<THPDevice*>(device.ptr())->device.type() != at::kMTIA;
    if (averages) {
      const auto op = py::reinterpret_borrow<py::object>(average());
      return {.reduce_scatter = op, .all_reduce = op};
    }
    const py::tuple found = imported<kCollectives, "_get_gradient_divide_factors">()(
        shards_.object, replicas_.object, dtype, attribute<"type">(device),
        fields_.get<"gradient_divide_factor">(), fields_.get<"force_sum_reduction_for_comms">());
    return {found[0], found[1], found[2], found[3]};
  }

  static py::handle average() {
    static auto* const op = attribute<"AVG">(imported<"torch.distributed", "ReduceOp">()).release().ptr();
    return op;
  }

  static void divide(const py::object& tensor, const py::object& factor) {
    if (!factor.is_none()) {
      imported<kCollectives, "_div_if_needed">()(tensor, factor);
    }
  }

  // Starts a collective with `op` by `call`, (backend or process group, output, input, options) -> c10d Work,
  // and waits for it. Returns false, with nothing done, unless comm_.can_run_own().
  template <typename Options, typename Call>
  bool try_run_own(const char* name, const ProcessGroup& group, const py::object& output,
                   const py::object& input, const py::object& op, const Call& call) const {
    if (!comm_.can_run_own(group.object, output)) {
      return false;
    }
    Options options;
    options.reduceOp =
        op.is(average()) ? c10d::ReduceOp(c10d::ReduceOp::AVG) : reduce_op_argument(op.ptr(), "fully_shard");
    options.asyncOp = false;
    const auto purpose = purpose_of(fields_);
    const Label label(purpose);
    comm_.run_own(name, group.object, output, input,
                  [&](auto& of, auto& to, auto& from) { return call(of, to, from, options); });
    return true;
  }

  void reduce_scatter(const py::object& output, const py::object& input, const py::object& op) const {
    const bool has_started =
        try_run_own<c10d::ReduceScatterOptions>("reduce_scatter_tensor", shards_, output, input, op,
                                                [](auto& of, auto& to, auto& from, const auto& options) {
                                                  return compat::reduce_scatter_flat(of, to, from, options);
                                                });
    if (!has_started) {
      comm_.object()(py::arg("output_tensor") = output, py::arg("input_tensor") = input,
                     py::arg("group") = shards_.object, py::arg("op") = op);
    }
  }

  void all_reduce(const py::object& output, const py::object& op) const {
    const bool has_started =
        try_run_own<c10d::AllreduceOptions>("all_reduce", replicas_, output, output, op,
                                            [](auto& of, auto& to, auto& /*from*/, const auto& options) {
                                              std::vector<at::Tensor> tensors{to};
                                              return of.allreduce(tensors, options);
                                            });
    if (!has_started) {
      py::module_::import("torch.distributed")
          .attr("all_reduce")(output, py::arg("group") = replicas_.object, py::arg("op") = op);
    }
  }

  static void record_consumer(const py::object& output, const py::object& stream) {
    if (!THPVariable_Unpack(output.ptr()).is_cpu()) {
      imported<kCollectives, "record_grad_output_stream">()(output, stream);
    }
  }

  // Neighboring parameters whose gradients have one dtype.
  struct DtypeRun {
    std::span<const Fields> params;
    std::span<const int64_t> lengths;
    int64_t length = 0;  // of all
    at::ScalarType dtype;
  };

  static std::vector<DtypeRun> runs_of(const Params& params, const std::vector<int64_t>& lengths,
                                       at::ScalarType reduced) {
    std::vector<DtypeRun> runs;
    for (size_t begin = 0; begin < params.size();) {
      const auto type = params[begin].get<"sharded_grad_dtype">();
      size_t end = begin;
      DtypeRun run{.dtype = type.is_none() ? reduced : to_dtype(type)};
      for (; end < params.size() && params[end].is<"sharded_grad_dtype">(type.ptr()); ++end) {
        run.length += lengths[end];
      }
      run.params = std::span(params).subspan(begin, end - begin);
      run.lengths = std::span(lengths).subspan(begin, end - begin);
      runs.push_back(run);
      begin = end;
    }
    return runs;
  }

  // Casts and accumulates the reduced gradients, on `stream`.
  //
  // PyTorch counterpart: _cast_and_view_sharded_grads.
  void cast_and_accumulate(const py::list& params, const at::Tensor& output,
                           const std::vector<int64_t>& lengths, const py::object& consumer,
                           const py::object& stream) const {
    const auto fields = param_fields(params);
    const auto runs = runs_of(fields, lengths, output.scalar_type());
    int64_t num_cast = 0;
    for (const auto& run : runs) {
      num_cast += run.dtype != output.scalar_type() ? run.length : 0;
    }
    // A run that is not cast keeps all of `output` alive; unless that is mostly its own, it is copied.
    const bool copies = num_cast > output.numel() - num_cast;
    int64_t offset = 0;
    for (const auto& run : runs) {
      const bool is_cast = run.dtype != output.scalar_type();
      auto part = runs.size() == 1 ? output : output.narrow(0, offset, run.length);
      if (is_cast || copies) {
        part = is_cast ? part.to(run.dtype) : part.clone();
        record_consumer(to_python(part), consumer);
      }
      accumulate(part, run.params, run.lengths, [&] { return streams_.recorded_event(stream); });
      offset += run.length;
    }
  }

  const Fields& fields_;
  ProcessGroup shards_;
  ProcessGroup replicas_;
  Streams streams_;
  Comm comm_;
};

// Returns true if the group's gradients are reduced without hooks of the program, and all at once.
bool has_default_reduction(const Group& group) {
  const auto& fields = group.fields;
  const auto modules = fields.get<"modules">();
  return fields.is<"_all_reduce_hook">(Py_None) && fields.is<"_all_reduce_hook_stream">(Py_None) &&
         fields.is<"_partial_reduce_output">(Py_None) &&
         fields.is<"reduce_scatter_unused_params">(Py_False) &&
         fields.is<"_prepare_reduce_scatter_inputs">(
             imported<kCollectives, "_default_reduce_scatter_input_fn">().ptr()) &&
         !(PyObject_Size(modules.ptr()) > 1 && is_in_state<"FORWARD">(fields)) &&
         gradients_are_dtensors(group.params) && std::ranges::all_of(group.params, is_cut_along_dim_0);
}

// Returns the process groups of the shards and of the replicas, null if there are none. Returns nullopt if
// the group is of an uncommon kind.
std::optional<std::pair<ProcessGroup, ProcessGroup>> process_groups(const Fields& group) {
  const auto mesh_info = group.get<"mesh_info">();
  if (!is_sharded_mesh(mesh_info)) {
    return std::nullopt;
  }
  const auto known = [&](py::object object) {
    auto c10d = group_object(object.ptr());
    check_is_current(mesh_info, c10d);
    return ProcessGroup{std::move(object), std::move(c10d)};
  };
  auto process_group = attribute<"reduce_scatter_process_group">(mesh_info);
  if (process_group.is_none()) {
    process_group = attribute<"shard_process_group">(mesh_info);
  }
  const auto shards = known(std::move(process_group));
  if (!shards.c10d || shards.c10d->getSize() == 1) {
    return std::nullopt;
  }
  if (!has_replicas(mesh_info)) {
    return std::pair{shards, ProcessGroup{py::none(), nullptr}};
  }
  const auto replicas = known(attribute<"replicate_process_group">(mesh_info));
  if (!replicas.c10d || !group.is<"all_reduce_grads">(Py_True)) {
    return std::nullopt;
  }
  return std::pair{shards, replicas};
}

}  // namespace

py::object fsdp_post_backward(py::handle fsdp_group) {
  const auto group = on_group_fast_path<unmodified_group>(fsdp_group, "FSDPParamGroup.post_backward");
  if (!group || !free_gathered_only(group->params)) {
    return {};
  }
  const bool reduces = !group->fields.is<"reduce_grads">(Py_False);
  const auto groups = reduces && has_default_reduction(*group) ? process_groups(group->fields) : std::nullopt;
  if (reduces && !groups) {
    return {};
  }

  set_state(group->fields, training_state<"POST_BACKWARD">());
  group->fields.set<"_post_backward_pending">(reduces ? Py_False : Py_True);
  auto taken = reduces ? take_gradients(*group) : std::nullopt;
  set_gradient_types(group->fields, /*deferred=*/false);
  if (group->fields.is_true<"reshard_after_backward">()) {
    to_sharded(*group);
  }
  if (!reduces) {
    return py::none();
  }
  TORCH_INTERNAL_ASSERT(taken);
  const Reduction reduction(*group, groups->first, groups->second);
  reduction.release_earlier_inputs();
  if (!taken->tensors.empty()) {
    reduction.run(*std::move(taken));
  }
  return py::none();
}

}  // namespace funcol::python
