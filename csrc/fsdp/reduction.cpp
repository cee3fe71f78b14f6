// The reduction of a group's gradients after its backward pass: post_backward() of fsdp/groups.h.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "comm/started.h"
#include "compat/process_group.h"
#include "fsdp/gather.h"
#include "fsdp/gradients.h"
#include "fsdp/groups.h"
#include "fsdp/streams.h"
#include "pyobjects/attributes.h"

namespace funcol::python {
namespace {

// The reduction of a group's gradients over one process group.
class Reduction {
 public:
  Reduction(const Group& group, c10::intrusive_ptr<c10d::ProcessGroup> c10d_group, py::object process_group)
      : fields_(group.fields),
        c10d_group_(std::move(c10d_group)),
        process_group_(std::move(process_group)),
        streams_(fields_),
        comm_(fields_.get<"_reduce_scatter_comm">(), imported<kCollectives, "DefaultReduceScatter">()) {}

  // Releases inputs of earlier reductions, but for the number of them that FSDP2 keeps.
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
      call_method<"_wait_for_post_backward">(fields_.object());
    }
    auto dtype = fields_.get<"_reduce_dtype">();
    if (dtype.is_none()) {
      dtype = attribute<"_get_reduce_dtype">(fields_.object())(taken.params, taken.tensors);
    }
    const at::NoGradGuard no_grad;
    const auto num_ranks = c10d_group_->getSize();
    const auto device = fields_.get<"device">();
    const auto factors = find_factors(dtype, device);
    const auto context = fields_.get<"comm_ctx">();
    const auto stream = attribute<"reduce_scatter_stream">(context);
    const auto current = streams_.current();
    std::vector<int64_t> lengths;  // of one rank's parts
    for (const auto gradient : taken.tensors) {
      lengths.push_back(padded_length(THPVariable_Unpack(gradient.ptr()), num_ranks) / num_ranks);
    }
    const auto length = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    const auto input = comm_.allocate(length * num_ranks, dtype, device);
    lay_out(taken.tensors, input, length * num_ranks);
    taken.tensors = py::list();
    streams_.wait_for_stream(stream, current);
    py::object output;
    py::object input_event;
    {
      const Entered entered(streams_.context(stream));
      output = comm_.allocate(length, dtype, device);
      divide(input, factors.before);
      reduce_scatter(output, input, factors.op);
      input_event = streams_.recorded_event(stream);
    }
    py::object event;
    {
      const Entered entered(streams_.context(stream));
      divide(output, factors.after);
      record_consumer(output, current);
      hand_out(taken.params, output, lengths, current);
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
  // What the gradients are divided by, beside what the reduction itself divides by.
  struct Factors {
    py::object before = py::none();
    py::object after = py::none();
    py::object op;
  };

  // Averages take no factors; PyTorch's function chooses all others.
  Factors find_factors(const py::object& dtype, const py::object& device) const {
    const auto type = to_dtype(dtype);
    const bool averages = (type == at::kFloat || type == at::kBFloat16) &&
                          fields_.is<"gradient_divide_factor">(Py_None) &&
                          fields_.is<"force_sum_reduction_for_comms">(Py_False) &&
                          reinterpret_cast<THPDevice*>(device.ptr())->device.type() != at::kMTIA;
    if (averages) {
      return {.op = py::reinterpret_borrow<py::object>(average())};
    }
    const py::tuple found = imported<kCollectives, "_get_gradient_divide_factors">()(
        process_group_, py::none(), dtype, attribute<"type">(device), fields_.get<"gradient_divide_factor">(),
        fields_.get<"force_sum_reduction_for_comms">());
    return {found[0], found[1], found[2]};
  }

  static py::handle average() {
    static auto* const op = attribute<"AVG">(imported<"torch.distributed", "ReduceOp">()).release().ptr();
    return op;
  }

  // Copies the gradients into `input`, which may be any tensor if a program's own comm has allocated it.
  void lay_out(const py::list& gradients, const py::object& input, int64_t length) const {
    const auto* const buffer = plain_tensor(input.ptr());
    const auto plain = buffer != nullptr && is_small_on_cpu(*buffer) && buffer->numel() == length
                           ? plain_gradients(gradients, buffer->scalar_type(), c10d_group_->getSize())
                           : std::nullopt;
    if (plain) {
      copy_gradients_in(*plain, *buffer, c10d_group_->getSize());
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
      const auto reduce_op = op.is(average()) ? c10d::ReduceOp(c10d::ReduceOp::AVG)
                                              : reduce_op_argument(op.ptr(), "fully_shard");
      const auto purpose = purpose_of(fields_);
      const Label label(purpose);
      comm_.start_own("reduce_scatter_tensor", process_group_, output, input,
                      [&](auto& of, auto& to, auto& from) {
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
    if (!dtype.is_none() && to_dtype(dtype) != THPVariable_Unpack(output.ptr()).scalar_type()) {
      output = attribute<"to">(output)(dtype);
      record_consumer(output, stream);
    }
    accumulate(THPVariable_Unpack(output.ptr()), fields, lengths);
  }

  const Fields& fields_;
  c10::intrusive_ptr<c10d::ProcessGroup> c10d_group_;
  py::object process_group_;
  Streams streams_;
  Comm comm_;
};

// Whether the group's gradients are reduced over one process group, without hooks or all_reduce.
bool reduces_as_usual(const Group& group) {
  const auto& fields = group.fields;
  const auto modules = fields.get<"modules">();
  return fields.is<"reduce_grads">(Py_True) && fields.is<"_all_reduce_hook">(Py_None) &&
         fields.is<"_all_reduce_hook_stream">(Py_None) && fields.is<"_partial_reduce_output">(Py_None) &&
         fields.is<"reduce_scatter_unused_params">(Py_False) &&
         fields.is<"_prepare_reduce_scatter_inputs">(
             imported<kCollectives, "_default_reduce_scatter_input_fn">().ptr()) &&
         PyObject_Size(fields.get<"_fsdp_params_with_wider_grad_dtype">().ptr()) == 0 &&
         !(PyObject_Size(modules.ptr()) > 1 && is_in_state<"FORWARD">(fields)) &&
         gradient_type(group.params) && std::ranges::all_of(group.params, is_cut_along_dim_0);
}

}  // namespace

py::object post_backward(py::handle fsdp_group) {
  const auto group = serves_groups() ? usual_group(fsdp_group.ptr(), Replaced::kPostBackward) : std::nullopt;
  if (!group || !free_gathered_only(group->params) || !reduces_as_usual(*group)) {
    return {};
  }
  const auto mesh_info = group->fields.get<"mesh_info">();
  if (!is_sharded_mesh(mesh_info, /*or_replicated=*/false)) {
    return {};
  }
  auto process_group = attribute<"reduce_scatter_process_group">(mesh_info);
  if (process_group.is_none()) {
    process_group = attribute<"shard_process_group">(mesh_info);
  }
  auto c10d_group = group_object(process_group.ptr());
  check_is_current(mesh_info, c10d_group);
  if (!c10d_group || c10d_group->getSize() == 1) {
    return {};
  }

  set_state(group->fields, training_state<"POST_BACKWARD">());
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
  return py::none();
}

}  // namespace funcol::python
