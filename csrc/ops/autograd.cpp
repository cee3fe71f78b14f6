#include "ops/autograd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "async/held_memory.h"
#include "async/layers.h"
#include "comm/process_group.h"
#include "ops/composed.h"
#include "ops/exchange.h"
#include "ops/reduction_rules.h"
#include "ops/routes.h"

namespace funcol::autograd {
namespace {

using at::Tensor;
using at::TensorList;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using Tensors = torch::autograd::variable_list;
using SymSizes = std::vector<SymInt>;

std::optional<SymSizes> copied(SplitSizes sizes) {
  return sizes.has_value() ? std::optional(sizes->vec()) : std::nullopt;
}

// split_sizes as backward finds it: an empty list stands for none.
void save_sizes(AutogradContext* ctx, const std::optional<SymSizes>& sizes) {
  ctx->saved_data["split_sizes"] = c10::SymIntArrayRef(sizes.value_or(SymSizes{}));
}

std::optional<SymSizes> saved_sizes(AutogradContext* ctx) {
  auto sizes = ctx->saved_data["split_sizes"].toSymIntVector();
  return sizes.empty() ? std::nullopt : std::optional(std::move(sizes));
}

SplitSizes as_argument(const std::optional<SymSizes>& sizes) {
  return sizes.has_value() ? SplitSizes(*sizes) : SplitSizes();
}

// What a rule that depends on values looks at; undefined for the others.
struct Values {
  Tensor input;
  Tensor output;
};

void save_values(AutogradContext* ctx, const IValue& reduce_op, const Tensor& input, const Tensor& output,
                 const char* op) {
  if (depends_on_values(reduce_op, op)) {
    ctx->save_for_backward({input, output});
  }
}

Values saved_values(AutogradContext* ctx) {
  auto tensors = ctx->get_saved_variables();
  return tensors.empty() ? Values{} : Values{std::move(tensors[0]), std::move(tensors[1])};
}

// Zeros of a shape, in no memory to speak of, where one rank has nothing to give.
//
// They depend on `empty`, which has no elements, where somebody records or traces: the rank's part in the
// collective of a second differentiation hangs on that, and its place behind the gradients in a traced graph.
Tensor zeros_after(const Tensor& empty, c10::SymIntArrayRef sizes) {
  const bool is_watched = at::GradMode::is_enabled() || has_active_layers() || belongs_to_layer(empty);
  return (is_watched ? empty.sum() : at::zeros({}, empty.options())).expand_symint(sizes);
}

struct AllReduce : Function<AllReduce> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const IValue& reduce_op,
                        const IValue& group) {
    auto output = run_unrecorded(input, composed::all_reduce, call::all_reduce, input, reduce_op, group);
    ctx->saved_data["reduce_op"] = reduce_op;
    ctx->saved_data["group"] = group;
    save_values(ctx, reduce_op, input, output, "all_reduce");
    return output;
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& gradients) {
    const GradientCollectives collectives;
    const auto& group = ctx->saved_data["group"];
    const auto total =
        call::all_reduce(gradients[0], totalling_op(ctx->saved_data["reduce_op"], "all_reduce"), group);
    const auto values = saved_values(ctx);
    return {reduction_gradient(total, values.input, values.output, ctx->saved_data["reduce_op"], group,
                               "all_reduce"),
            {},
            {}};
  }
};

struct AllGather : Function<AllGather> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t dim, const IValue& group,
                        const std::optional<SymSizes>& split_sizes) {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["group"] = group;
    ctx->saved_data["is_scalar"] = input.dim() == 0;
    save_sizes(ctx, split_sizes);
    return run_unrecorded(input, composed::all_gather_along_dim, call::all_gather_along_dim, input, dim,
                          group, as_argument(split_sizes));
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& gradients) {
    const GradientCollectives collectives;
    const auto sizes = saved_sizes(ctx);
    const auto dim = ctx->saved_data["dim"].toInt();
    const bool is_packed = sizes.has_value() || (dim != 0 && dim + gradients[0].dim() != 0);
    const auto whole = is_packed ? gradients[0] : GradientCollectives::unshared(gradients[0]);
    const auto own =
        call::reduce_scatter_along_dim(whole, "sum", dim, ctx->saved_data["group"], as_argument(sizes));
    return {ctx->saved_data["is_scalar"].toBool() ? own.squeeze(0) : own, {}, {}, {}};
  }
};

struct ReduceScatter : Function<ReduceScatter> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const IValue& reduce_op, int64_t dim,
                        const IValue& group, const std::optional<SymSizes>& split_sizes) {
    auto output = run_unrecorded(input, composed::reduce_scatter_along_dim, call::reduce_scatter_along_dim,
                                 input, reduce_op, dim, group, as_argument(split_sizes));
    ctx->saved_data["reduce_op"] = reduce_op;
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["group"] = group;
    save_sizes(ctx, split_sizes);
    save_values(ctx, reduce_op, input, output, "reduce_scatter_tensor");
    return output;
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& gradients) {
    const auto& group = ctx->saved_data["group"];
    const auto dim = ctx->saved_data["dim"].toInt();
    const auto sizes = saved_sizes(ctx);
    const GradientCollectives collectives;
    const auto gathered = [&](const Tensor& part) {
      return part.defined() ? call::all_gather_along_dim(part, dim, group, as_argument(sizes)) : part;
    };
    const auto& reduce_op = ctx->saved_data["reduce_op"];
    const auto values = saved_values(ctx);
    const auto part = GradientCollectives::unshared(gradients[0]);
    return {reduction_gradient(gathered(weighted(part, reduce_op, group, "reduce_scatter_tensor")),
                               values.input, gathered(GradientCollectives::unshared(values.output)),
                               reduce_op, group, "reduce_scatter_tensor"),
            {},
            {},
            {},
            {}};
  }
};

struct AllToAll : Function<AllToAll> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, c10::SymIntArrayRef output_splits,
                        c10::SymIntArrayRef input_splits, const IValue& group) {
    ctx->saved_data["output_splits"] = output_splits;
    ctx->saved_data["input_splits"] = input_splits;
    ctx->saved_data["group"] = group;
    return run_unrecorded(input, composed::all_to_all_single, call::all_to_all_single, input, output_splits,
                          input_splits, group);
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& gradients) {
    const auto output_splits = ctx->saved_data["output_splits"].toSymIntVector();
    const auto input_splits = ctx->saved_data["input_splits"].toSymIntVector();
    const GradientCollectives collectives;
    const auto sent = GradientCollectives::unshared(gradients[0]);
    return {call::all_to_all_single(sent, input_splits, output_splits, ctx->saved_data["group"]), {}, {}, {}};
  }
};

struct Permute : Function<Permute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, at::IntArrayRef destinations,
                        const IValue& group) {
    ctx->saved_data["destinations"] = destinations;
    ctx->saved_data["group"] = group;
    ctx->saved_data["sizes"] = input.sym_sizes();
    return run_unrecorded(input, composed::permute_tensor, call::permute_tensor, input, destinations, group);
  }

  // Whole tensors travel back to where they came from, as rows of an exchange.
  static Tensors backward(AutogradContext* ctx, const Tensors& gradients) {
    const auto destinations = ctx->saved_data["destinations"].toIntVector();
    const auto sizes = ctx->saved_data["sizes"].toSymIntVector();
    const auto& group = ctx->saved_data["group"];
    const PermuteSplits splits(destinations, *group_from_ivalue(group, "permute_tensor"));
    SymSizes row_sizes{SymInt(splits.num_received)};
    row_sizes.insert(row_sizes.end(), sizes.begin(), sizes.end());
    const GradientCollectives collectives;
    const auto gradient = GradientCollectives::unshared(gradients[0]);
    const auto rows =
        call::all_to_all_single(gradient.reshape_symint(row_sizes), c10::fromIntArrayRefSlow(splits.sent),
                                c10::fromIntArrayRefSlow(splits.received), group);
    return {splits.num_sent == 1 ? rows.squeeze(0) : zeros_after(rows, sizes), {}, {}};
  }
};

struct Broadcast : Function<Broadcast> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t source, const IValue& group) {
    ctx->saved_data["source"] = source;
    ctx->saved_data["group"] = group;
    return run_unrecorded(input, composed::broadcast, call::broadcast, input, source, group);
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& gradients) {
    const GradientCollectives collectives;
    return {call::reduce(gradients[0], "sum", ctx->saved_data["source"].toInt(), ctx->saved_data["group"]),
            {},
            {}};
  }
};

struct Reduce : Function<Reduce> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const IValue& reduce_op,
                        int64_t destination, const IValue& group) {
    auto output = run_unrecorded(input, composed::reduce, call::reduce, input, reduce_op, destination, group);
    ctx->saved_data["reduce_op"] = reduce_op;
    ctx->saved_data["destination"] = destination;
    ctx->saved_data["group"] = group;
    save_values(ctx, reduce_op, input, output, "reduce");
    return output;
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& gradients) {
    const GradientCollectives collectives;
    const auto& group = ctx->saved_data["group"];
    const auto sent = [&](const Tensor& tensor) {
      return tensor.defined() ? call::broadcast(tensor, ctx->saved_data["destination"].toInt(), group)
                              : tensor;
    };
    const auto& reduce_op = ctx->saved_data["reduce_op"];
    const auto values = saved_values(ctx);
    return {reduction_gradient(sent(weighted(gradients[0], reduce_op, group, "reduce")), values.input,
                               sent(values.output), reduce_op, group, "reduce"),
            {},
            {},
            {}};
  }
};

struct Scatter : Function<Scatter> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t source, int64_t dim,
                        const IValue& group, const std::optional<SymSizes>& split_sizes) {
    ctx->saved_data["source"] = source;
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["group"] = group;
    ctx->saved_data["sizes"] = input.sym_sizes();
    save_sizes(ctx, split_sizes);
    return run_unrecorded(input, composed::scatter, call::scatter, input, source, dim, group,
                          as_argument(split_sizes));
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& gradients) {
    const GradientCollectives collectives;
    const auto& group = ctx->saved_data["group"];
    const auto source = ctx->saved_data["source"].toInt();
    const auto sizes = saved_sizes(ctx);
    const auto gathered =
        call::gather(gradients[0], source, ctx->saved_data["dim"].toInt(), group, as_argument(sizes));
    const bool is_source = group_from_ivalue(group, "scatter")->getRank() == source;
    return {is_source ? gathered : zeros_after(gathered, ctx->saved_data["sizes"].toSymIntVector()),
            {},
            {},
            {},
            {}};
  }
};

struct Gather : Function<Gather> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t destination, int64_t dim,
                        const IValue& group, const std::optional<SymSizes>& split_sizes) {
    auto output = run_unrecorded(input, composed::gather, call::gather, input, destination, dim, group,
                                 as_argument(split_sizes));
    dim = dim < 0 ? dim + input.dim() : dim;
    auto whole = input.sym_sizes().vec();
    whole[dim] = whole[dim] * SymInt(group_from_ivalue(group, "gather")->getSize());
    if (split_sizes.has_value()) {
      whole[dim] = SymInt(0);
      for (const auto& size : *split_sizes) {
        whole[dim] = whole[dim] + size;
      }
    }
    ctx->saved_data["destination"] = destination;
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["group"] = group;
    ctx->saved_data["whole"] = c10::SymIntArrayRef(whole);
    save_sizes(ctx, split_sizes);
    return output;
  }

  // Ranks other than the root have an empty gradient; a scatter takes the whole's shape from them.
  static Tensors backward(AutogradContext* ctx, const Tensors& gradients) {
    const GradientCollectives collectives;
    const auto& group = ctx->saved_data["group"];
    const auto destination = ctx->saved_data["destination"].toInt();
    const auto sizes = saved_sizes(ctx);
    const bool has_whole = group_from_ivalue(group, "gather")->getRank() == destination;
    const auto whole =
        has_whole ? gradients[0] : zeros_after(gradients[0], ctx->saved_data["whole"].toSymIntVector());
    return {call::scatter(whole, destination, ctx->saved_data["dim"].toInt(), group, as_argument(sizes)),
            {},
            {},
            {},
            {}};
  }
};

}  // namespace

bool needs_gradient(TensorList inputs) {
  return at::GradMode::is_enabled() && std::ranges::any_of(inputs, [](const Tensor& input) {
           return input.defined() && input.requires_grad();
         });
}

Tensor all_reduce(const Tensor& input, const IValue& reduce_op, const IValue& group) {
  return AllReduce::apply(input, reduce_op, group);
}

Tensor all_gather(const Tensor& input, int64_t dim, const IValue& group, SplitSizes split_sizes) {
  return AllGather::apply(input, dim, group, copied(split_sizes));
}

Tensor reduce_scatter(const Tensor& input, const IValue& reduce_op, int64_t dim, const IValue& group,
                      SplitSizes split_sizes) {
  return ReduceScatter::apply(input, reduce_op, dim, group, copied(split_sizes));
}

Tensor all_to_all(const Tensor& input, c10::SymIntArrayRef output_splits, c10::SymIntArrayRef input_splits,
                  const IValue& group) {
  return AllToAll::apply(input, output_splits, input_splits, group);
}

Tensor permute(const Tensor& input, at::IntArrayRef destinations, const IValue& group) {
  return Permute::apply(input, destinations, group);
}

Tensor broadcast(const Tensor& input, int64_t source, const IValue& group) {
  return Broadcast::apply(input, source, group);
}

Tensor reduce(const Tensor& input, const IValue& reduce_op, int64_t destination, const IValue& group) {
  return Reduce::apply(input, reduce_op, destination, group);
}

Tensor scatter(const Tensor& input, int64_t source, int64_t dim, const IValue& group,
               SplitSizes split_sizes) {
  return Scatter::apply(input, source, dim, group, copied(split_sizes));
}

Tensor gather(const Tensor& input, int64_t destination, int64_t dim, const IValue& group,
              SplitSizes split_sizes) {
  return Gather::apply(input, destination, dim, group, copied(split_sizes));
}

}  // namespace funcol::autograd
