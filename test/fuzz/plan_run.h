// Runs a plan on simulated ranks, step by step.
#pragma once

#include "planner/plan.h"
#include "simulated_ranks.h"

namespace funcol::test {

// A masked partial: the rank whose index on the axis is that of the element has the number, others have
// anything until the mask is applied.
inline bool is_masked_out(size_t element, int64_t index, int64_t num_ranks) {
  return static_cast<int64_t>(element) % num_ranks != index;
}

class PlanRun {
 public:
  // `tensors` is in the layout plan.src.
  PlanRun(const Plan& plan, RankTensors tensors);

  // The tensors in the layout plan.dst, with masks applied. Fails, naming the step, if a rank lacks an
  // element that it needs.
  RankTensors run();

 private:
  void run(const Step& step);
  // The group of `rank`: the ranks that differ from it on the step's axes alone.
  std::vector<size_t> group_of(const Step& step, size_t rank) const;
  // The numbers that the group's ranks hold of an element.
  std::vector<double> held(const std::vector<size_t>& group, int64_t element) const;
  // The number that `rank` has of the element after the step.
  double number_after(const Step& step, size_t rank, int64_t element) const;
  void apply_masks(const Layout& layout, int64_t axis);
  void place(const Layout& layout);

  const Plan& plan_;
  const std::vector<Coordinate> ranks_;
  RankTensors tensors_;
  std::vector<Indices> elements_;             // of each rank, in memory order
  std::vector<std::vector<int64_t>> places_;  // of each element in a rank's tensor; -1 if it lacks it
};

}  // namespace funcol::test
