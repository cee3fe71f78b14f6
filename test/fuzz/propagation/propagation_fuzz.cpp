// Decisions of sharding propagation. Each is refused, or right: the inputs are cut as it says, the operator
// runs on every rank's tensors, and its results are those of the whole tensors in the layouts that it says.
#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "bytes.h"
#include "failure.h"
#include "fuzz_target.h"
#include "propagation/operators.h"
#include "propagation/propagator.h"
#include "simulated_ranks.h"

namespace funcol::test {
namespace {

// Costs are sums of up to ten numbers; results are sums of up to a hundred.
constexpr double kRounding = 1e-9;

// The id of a mask that is no new one of a decision: these are odd, and 2 stands for any.
constexpr uint64_t kMask = 64;

Layout layout_from(Bytes& bytes, const Mesh& mesh, const TensorMeta& meta) {
  const auto ops = is_floating_point(meta.dtype)
                       ? std::vector{PartialOp::kSum, PartialOp::kAvg, PartialOp::kMax, PartialOp::kMin}
                       : std::vector<PartialOp>{};
  const auto op = ops.empty() ? PartialOp::kSum : bytes.one_of(ops);
  const auto strided = bytes.below(4) == 1;
  std::vector<Placement> placements;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    const auto choice = bytes.below(8);
    if (choice < 2 || (choice > 3 && meta.num_dims() == 0)) {
      placements.push_back(Placement::replicate());
    } else if (choice < 4) {
      placements.push_back(ops.empty() ? Placement::replicate() : Placement::partial(op));
    } else {
      placements.push_back(
          Placement::shard(bytes.below(meta.num_dims()), strided ? bytes.one_of<int64_t>({1, 2, 3}) : 1));
    }
  }
  const auto partial = std::ranges::find_if(placements, [](const auto& one) { return one.is_partial(); });
  if (partial != placements.end() && op == PartialOp::kSum && bytes.below(4) == 1) {
    partial->mask = kMask;  // of a lookup: the sum is the same
  }
  auto order = bytes.below(4) == 1 ? order_from(bytes, placements) : ShardOrder();
  return make_layout("propagation_fuzz", std::move(placements), std::move(order), mesh, meta.num_dims());
}

std::string described(const OpSchema& schema, const OutputSharding& decision) {
  std::string text = to_string(schema) + " decided as";
  for (const auto& output : decision.outputs) {
    text += " " + (output ? to_string(output->layout) : std::string("-"));
  }
  text += " <-";
  for (const auto& input : decision.inputs) {
    text += " " + to_string(input);
  }
  return text;
}

// The axis on which the layout has a new mask; -1 if there is none.
int64_t masked_axis(const Layout& layout) {
  for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
    if (layout.placements[axis].mask % 2 == 1) {
      return static_cast<int64_t>(axis);
    }
  }
  return -1;
}

class DecisionCheck {
 public:
  DecisionCheck(const Case& of, const OpSchema& schema, const OutputSharding& decision, PartialForm form)
      : case_(of), schema_(schema), decision_(decision), ranks_(coordinates(schema.mesh)), form_(form) {}

  void run() {
    check_form();
    for (size_t i = 0; i < case_.wholes.size(); ++i) {
      inputs_.push_back(input(i));
    }
    std::vector<RankTensors> results(case_.call.outputs.size());
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      auto outputs = run_on(rank);
      for (size_t i = 0; i < results.size(); ++i) {
        results[i].push_back(std::move(outputs.at(i)));
      }
    }
    std::vector<Shape> shapes;
    for (const auto& output : case_.call.outputs) {
      shapes.push_back(output->shape);
    }
    const auto expected = case_.kernel(case_.wholes, shapes);
    for (size_t i = 0; i < results.size(); ++i) {
      const auto wrong = difference(results[i], expected[i], layout_of_result(i), schema_.mesh, kRounding);
      if (!wrong.empty()) {
        refuse("result " + std::to_string(i) + ": " + wrong);
      }
    }
  }

 private:
  // Returns the layout of a result. An operator in place on lists returns nothing: the tensors that it writes
  // to keep their layouts, whatever is decided.
  const Layout& layout_of_result(size_t i) const {
    return schema_.written.empty() ? decision_.outputs.at(i)->layout : *schema_.results.at(i);
  }

  [[noreturn]] void refuse(const std::string& what) const {
    fail(what + "; " + described(schema_, decision_) + "; shapes of results" + shapes_of_results());
  }

  std::string shapes_of_results() const {
    std::string text;
    for (const auto& output : case_.call.outputs) {
      text += " " + joined(output->shape);
    }
    return text;
  }

  void check_form() const {
    bool moves = false;
    for (size_t i = 0; i < schema_.layouts.size(); ++i) {
      const bool moves_this = decision_.inputs.at(i) != schema_.layouts[i];
      moves = moves || moves_this;
      if (moves_this && schema_.is_pinned[i]) {
        refuse("an input that stays moves");
      }
    }
    if (decision_.needs_redistribute != moves) {
      refuse("needs_redistribute is wrong");
    }
    for (size_t i = 0; i < schema_.results.size(); ++i) {
      if (schema_.results[i] && layout_of_result(i) != *schema_.results[i]) {
        refuse("a result does not have the layout that it must have");
      }
    }
  }

  // The indices of the masked dim that a rank holds.
  Interval held(const IndexMask& mask, int64_t axis, size_t rank) const {
    const Mesh line{{schema_.mesh.sizes[axis]}, {}, {}};
    const auto cut = make_layout("test", {Placement::shard(mask.dim)}, {}, line, std::ssize(mask.shape));
    const auto intervals = local_indices(cut, line, mask.dim, mask.shape[mask.dim], {ranks_[rank][axis]});
    return intervals.empty() ? Interval{} : intervals.front();
  }

  static bool is_outside(double index, const Interval& held) {
    return index < static_cast<double>(held.begin) || index >= static_cast<double>(held.end());
  }

  RankTensors input(size_t i) const {
    Layout layout = decision_.inputs[i];
    const int64_t axis = masked_axis(layout);
    if (axis >= 0) {
      layout.placements[axis] = Placement::replicate();
    }
    const auto form = decision_.inputs[i] == schema_.layouts[i] ? PartialForm::kNoise : form_;
    auto tensors = distributed(case_.wholes[i], layout, schema_.mesh, i + 1, form);
    for (size_t rank = 0; axis >= 0 && rank < ranks_.size(); ++rank) {
      const auto interval = held(decision_.masks.at(0), axis, rank);
      for (double& index : tensors[rank].values) {
        index = is_outside(index, interval) ? 0 : index - static_cast<double>(interval.begin);
      }
    }
    return tensors;
  }

  std::vector<Numbers> run_on(size_t rank) const {
    std::vector<Numbers> inputs;
    for (const auto& tensors : inputs_) {
      inputs.push_back(tensors[rank]);
    }
    std::vector<Shape> shapes;
    for (size_t i = 0; i < case_.call.outputs.size(); ++i) {
      shapes.push_back(
          local_shape(layout_of_result(i), schema_.mesh, case_.call.outputs[i]->shape, ranks_[rank]));
    }
    std::vector<Numbers> outputs;
    try {
      outputs = case_.kernel(inputs, shapes);
    } catch (const CannotRun& error) {
      refuse("rank " + joined(ranks_[rank]) + " cannot run it: " + error.what());
    }
    const int64_t axis = masked_axis(layout_of_result(0));
    if (axis >= 0) {
      hide_masked(outputs[0], rank, axis);
    }
    return outputs;
  }

  // Results of indices that other ranks of the axis hold become 0. Each index gives one number or several.
  void hide_masked(Numbers& output, size_t rank, int64_t axis) const {
    const auto indices = whole_indices(rank, axis);
    const size_t of_each = indices.values.empty() ? 0 : output.values.size() / indices.values.size();
    const auto interval = held(decision_.masks.at(0), axis, rank);
    for (size_t i = 0; i < output.values.size(); ++i) {
      output.values[i] = is_outside(indices.values[i / of_each], interval) ? 0 : output.values[i];
    }
  }

  // The indices before the mask: of the input that has it, which is the last one.
  Numbers whole_indices(size_t rank, int64_t axis) const {
    Layout layout = decision_.inputs.back();
    layout.placements[axis] = Placement::replicate();
    return local_part(case_.wholes.back(), layout, schema_.mesh, ranks_[rank]);
  }

  const Case& case_;
  const OpSchema& schema_;
  const OutputSharding& decision_;
  const std::vector<Coordinate> ranks_;
  const PartialForm form_;
  std::vector<RankTensors> inputs_;
};

double total_of(const OutputSharding& decision) {
  return std::accumulate(decision.costs.begin(), decision.costs.end(), 0.0);
}

// Writes the first result to the first tensor: "aten::add_.Tensor" for "aten::add.Tensor".
void write_in_place(OpSchema& schema, bool is_of_list) {
  auto& op = schema.call.op;
  op.insert(without_overload(op).size(), "_");
  schema.is_pinned[0] = true;
  schema.results = {schema.layouts[0]};
  if (is_of_list) {
    schema.written = {0};
  }
}

Case case_from(Bytes& bytes) {
  using Make = Case (*)(Bytes&);
  return bytes.one_of<Make>(
      {pointwise_case, product_case, reduction_case, view_case, joining_case, indexing_case})(bytes);
}

// One of all legal decisions, which the cheapest one has to be among.
void check_any_decision(Bytes& bytes, const Propagator& propagator, const Case& of, const OpSchema& schema,
                        const OutputSharding* cheapest, PartialForm form) {
  const auto all = propagator.strategies(schema);
  double least = kImpossible;
  for (const auto& decision : all) {
    least = std::min(least, total_of(decision));
  }
  if (cheapest != nullptr && total_of(*cheapest) > least + kRounding * least &&
      cheapest->needs_redistribute) {
    fail("not the cheapest decision; " + described(schema, *cheapest));
  }
  if (cheapest == nullptr && least < kImpossible) {
    fail("refused, but there is a decision; " + to_string(schema));
  }
  if (!all.empty()) {
    DecisionCheck(of, schema, all[static_cast<size_t>(bytes.below(256)) * all.size() / 256], form).run();
  }
}

}  // namespace

void run(Bytes& bytes) {
  const Mesh mesh = mesh_from(bytes, 3, 12);
  Case of;
  try {
    of = case_from(bytes);
  } catch (const CannotRun&) {
    return;  // not a call of whole tensors
  }
  OpSchema schema{of.call, mesh, {}, std::vector<bool>(of.call.tensors.size()), {}};
  for (const auto& meta : of.call.tensors) {
    schema.layouts.push_back(layout_from(bytes, mesh, meta));
  }
  if (of.may_be_in_place && bytes.coin() && of.call.outputs[0]->shape == of.call.tensors[0].shape) {
    write_in_place(schema, of.is_of_list);
  }
  const auto form = bytes.coin() ? PartialForm::kNeutral : PartialForm::kNoise;
  const Propagator propagator([&](const OpCall&) {
    return schema.written.empty() ? of.call.outputs : std::vector<std::optional<TensorMeta>>();
  });
  std::optional<OutputSharding> decision;
  try {
    decision = propagator.propagate(schema);
  } catch (const std::invalid_argument&) {
    if (schema.results.empty() && schema.call.op != "aten::linalg_vector_norm") {
      throw;  // without a tensor that stays, every input can be replicated
    }
  }
  if (decision) {
    DecisionCheck(of, schema, *decision, form).run();
    if (of.changes_nothing && decision->needs_redistribute) {
      fail("a view of the same shape moves its tensor; " + described(schema, *decision));
    }
  }
  if (bytes.below(4) == 1) {
    check_any_decision(bytes, propagator, of, schema, decision ? &*decision : nullptr, form);
  }
}

}  // namespace funcol::test
