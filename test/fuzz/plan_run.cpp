#include "plan_run.h"

#include "failure.h"
#include "planner/legal.h"

namespace funcol::test {

PlanRun::PlanRun(const Plan& plan, RankTensors tensors)
    : plan_(plan), ranks_(coordinates(plan.mesh)), tensors_(std::move(tensors)) {
  place(plan.src);
}

RankTensors PlanRun::run() {
  for (const auto& step : plan_.steps) {
    run(step);
  }
  for (int64_t axis = 0; axis < plan_.mesh.num_axes(); ++axis) {
    apply_masks(plan_.dst, axis);
  }
  return tensors_;
}

void PlanRun::run(const Step& step) {
  if (step.kind == StepKind::kApplyMask) {
    for (int64_t axis = 0; axis < plan_.mesh.num_axes(); ++axis) {
      if (contains(step.axes, axis)) {
        apply_masks(step.before, axis);
      }
    }
    return;
  }
  RankTensors next;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    Numbers numbers{local_shape(step.after, plan_.mesh, plan_.shape, ranks_[rank]), {}};
    for (const int64_t element : elements(step.after, plan_.mesh, plan_.shape, ranks_[rank])) {
      numbers.values.push_back(number_after(step, rank, element));
    }
    next.push_back(std::move(numbers));
  }
  tensors_ = std::move(next);
  place(step.after);
}

std::vector<size_t> PlanRun::group_of(const Step& step, size_t rank) const {
  std::vector<size_t> group;
  for (size_t other = 0; other < ranks_.size(); ++other) {
    bool differs_elsewhere = false;
    for (int64_t axis = 0; axis < plan_.mesh.num_axes(); ++axis) {
      differs_elsewhere =
          differs_elsewhere || (!contains(step.axes, axis) && ranks_[rank][axis] != ranks_[other][axis]);
    }
    if (!differs_elsewhere) {
      group.push_back(other);
    }
  }
  return group;
}

std::vector<double> PlanRun::held(const std::vector<size_t>& group, int64_t element) const {
  std::vector<double> numbers;
  for (const size_t rank : group) {
    if (places_[rank][element] >= 0) {
      numbers.push_back(tensors_[rank].values[places_[rank][element]]);
    }
  }
  return numbers;
}

double PlanRun::number_after(const Step& step, size_t rank, int64_t element) const {
  const int64_t own = places_[rank][element];
  std::vector<int64_t> axes;  // of several ranks
  for (int64_t axis = 0; axis < plan_.mesh.num_axes(); ++axis) {
    if (contains(step.axes, axis) && plan_.mesh.sizes[axis] > 1) {
      axes.push_back(axis);
    }
  }
  const auto numbers = communicates(step.kind) ? held(group_of(step, rank), element)
                       : own >= 0              ? std::vector{tensors_[rank].values[own]}
                                               : std::vector<double>{};
  if (numbers.empty() && step.kind != StepKind::kEmbed) {
    fail(to_string(step, plan_.mesh) + ": nobody has element " + std::to_string(element) + " for rank " +
         joined(ranks_[rank]) + " in " + to_string(plan_));
  }
  switch (step.kind) {
    case StepKind::kReduceScatter:
    case StepKind::kAllReduce:
      return reduction_of(numbers, axes, step.before, plan_.mesh);
    case StepKind::kToPartial: {
      const auto op = step.after.placements[axes.front()].op;
      return ranks_[rank][axes.front()] == 0 || op == PartialOp::kAvg ? numbers.front() : neutral_element(op);
    }
    case StepKind::kEmbed:
      return numbers.empty() ? neutral_element(step.after.placements[axes.front()].op) : numbers.front();
    default:
      return numbers.front();
  }
}

void PlanRun::apply_masks(const Layout& layout, int64_t axis) {
  if (layout.placements[axis].mask == 0) {
    return;
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (size_t i = 0; i < elements_[rank].size(); ++i) {
      if (is_masked_out(elements_[rank][i], ranks_[rank][axis], plan_.mesh.sizes[axis])) {
        tensors_[rank].values[i] = 0;
      }
    }
  }
}

void PlanRun::place(const Layout& layout) {
  elements_.clear();
  places_.assign(ranks_.size(), std::vector<int64_t>(num_elements(plan_.shape), -1));
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    elements_.push_back(elements(layout, plan_.mesh, plan_.shape, ranks_[rank]));
    for (size_t i = 0; i < elements_[rank].size(); ++i) {
      places_[rank][elements_[rank][i]] = static_cast<int64_t>(i);
    }
  }
}

}  // namespace funcol::test
