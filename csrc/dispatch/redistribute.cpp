#include "dispatch/redistribute.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "dispatch/dtensor_node.h"
#include "dispatch/supported_dtensor.h"
#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

class RedistributeBackward final : public BackwardFunction {
 public:
  // Redistributes the gradient to `spec`: sends it as `sent_dtype`, and returns it as `result_dtype`.
  RedistributeBackward(py::object spec, at::ScalarType sent_dtype, at::ScalarType result_dtype,
                       RedistributionOptions options)
      : spec_(std::move(spec)),
        sent_dtype_(sent_dtype),
        result_dtype_(result_dtype),
        options_(std::move(options)) {}
  const char* name() const override { return "funcol::redistribute"; }

  py::object apply(const py::object& gradient) const override {
    if (is_dtensor(gradient)) {
      const auto wanted = plain_spec(spec_);
      const auto held = plain_spec(attribute<"_spec">(gradient));
      if (wanted.has_value() && held.has_value()) {
        // A gradient that is already reduced stays reduced.
        const auto placements =
            with_replicate(wanted->objects.placements, held->placements.size(), [&](size_t axis) {
              return wanted->placements[axis].is_partial() && !held->placements[axis].is_partial();
            });
        if (auto result = redistribute(
                gradient, {placements, wanted->objects.order, sent_dtype_, result_dtype_, sent_dtype_},
                options_)) {
          return result;
        }
      }
    }
    return callback("gradient_of_redistribute")(gradient, spec_, to_python(sent_dtype_),
                                                to_python(result_dtype_), options_.async_op, options_.model,
                                                options_.max_bytes);
  }

  // Leaves out models and bounds on memory, which choose among plans of equal results.
  std::vector<uint64_t> key() const override {
    return {hash_word(spec_), static_cast<uint64_t>(sent_dtype_), static_cast<uint64_t>(result_dtype_),
            options_.async_op ? 1U : 0U};
  }

 private:
  py::object spec_;
  at::ScalarType sent_dtype_;
  at::ScalarType result_dtype_;
  RedistributionOptions options_;
};

// Returns `local` redistributed: sent as `sent_dtype`, and returned as `result_dtype`.
at::Tensor run(const Execution& execution, const at::Tensor& local, at::ScalarType sent_dtype,
               at::ScalarType result_dtype, bool async_op) {
  const WithoutGil no_gil;
  const auto sent = local.scalar_type() == sent_dtype ? local : local.to(sent_dtype);
  const auto received = execution.run(sent, async_op);
  return sent_dtype == result_dtype ? received : received.to(result_dtype);
}

// A redistributed local tensor, and the spec of its new DTensor, without its mesh; null if the tensor
// does not change.
struct RedistributedLocal {
  at::Tensor local;
  py::object spec;
};

// Redistributes `local`. Returns nullopt, with nothing done, if C++ does not support the redistribution.
// Moves members out of `source`.
std::optional<RedistributedLocal> try_redistribute(const at::Tensor& local, py::handle spec,
                                                   PlainSpec& source, const RedistributionTarget& target,
                                                   const RedistributionOptions& options) {
  auto wanted = plain_placements(target.placements, source.placements.size(), source.num_dims());
  if (!wanted.has_value()) {
    return std::nullopt;
  }
  const auto sent_dtype = target.sent_dtype.value_or(local.scalar_type());
  const auto result_dtype = target.result_dtype.value_or(local.scalar_type());
  // As in PyTorch, the dtype of a spec need not be that of the local tensor.
  const auto spec_dtype = target.result_dtype.value_or(source.dtype);
  const bool is_any_order = target.order.is(py::ellipsis());
  const auto order = is_any_order ? py::none() : target.order;
  const bool keeps_order =
      is_any_order || (order.is_none() ? is_default(source.order) : order.is(source.objects.order));
  if (keeps_order && *wanted == source.placements && sent_dtype == local.scalar_type() &&
      result_dtype == local.scalar_type() && spec_dtype == source.dtype) {
    return RedistributedLocal{local, {}};
  }
  const TransferKey key{source.known->id,
                        {std::move(source.placements), std::move(source.order)},
                        {*std::move(wanted), to_shard_order(order)},
                        std::move(source.shape),
                        static_cast<int64_t>(c10::elementSize(sent_dtype)),
                        options.model,
                        options.max_bytes,
                        std::move(source.stride),
                        spec_dtype};
  const auto& mesh = source.objects.mesh;
  auto found = find_transfer(key, spec, mesh, target.placements, order, within_mesh(mesh, *source.known));
  const auto& execution = *found.program->before;
  if (!execution.fits(local)) {
    return std::nullopt;
  }
  return RedistributedLocal{run(execution, local, sent_dtype, result_dtype, options.async_op),
                            std::move(found.spec)};
}

}  // namespace

py::object redistribute(py::handle dtensor, const RedistributionTarget& target,
                        const RedistributionOptions& options) {
  const auto local = plain_local(dtensor);
  if (!local.defined()) {
    return {};
  }
  const auto spec = attribute<"_spec">(dtensor);
  auto source = plain_spec(spec);
  if (!source.has_value()) {
    return {};
  }
  const Geometry geometry(source->shape, source->stride);
  auto redistributed = try_redistribute(local, spec, *source, target, options);
  if (!redistributed.has_value()) {
    return {};
  }
  const auto new_spec =
      redistributed->spec ? copy_onto(redistributed->spec, source->objects.mesh) : copy_spec(spec);
  auto result = to_python(make_dtensor(std::move(redistributed->local), new_spec, geometry));
  const auto& tensor = THPVariable_Unpack(dtensor.ptr());
  if (is_recorded(tensor)) {
    record<RedistributeBackward>(tensor, result, spec, target.gradient_dtype.value_or(local.scalar_type()),
                                 local.scalar_type(), options);
  }
  return result;
}

std::optional<at::Tensor> redistributed_local(const at::Tensor& local, py::handle spec,
                                              const RedistributionTarget& target) {
  auto source = plain_spec(spec);
  auto redistributed = source.has_value() ? try_redistribute(local, spec, *source, target, {}) : std::nullopt;
  return redistributed.has_value() ? std::optional(std::move(redistributed->local)) : std::nullopt;
}

}  // namespace funcol::python
