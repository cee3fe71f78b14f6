#include "planner/cost_model.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace funcol {
namespace {

// The costs of the five collectives, in the order of StepKind.
constexpr std::array<double, 5> kStepCounts{2, 2, 4, 1, 1};
constexpr double kBaseLatency = 6.6;  // us
constexpr std::array<LinkCost AxisCost::*, 5> kLinks{&AxisCost::all_gather, &AxisCost::reduce_scatter,
                                                     &AxisCost::all_reduce, &AxisCost::all_to_all,
                                                     &AxisCost::permute};

// Returns the cost of one byte of a collective over several axes: for each axis, its price times the share of
// the bytes that crosses it. `axes` are {price, number of ranks}, slowest first: bytes cross a slow axis in
// the stage in which there are fewest.
double staged_us_per_byte(StepKind kind, const std::vector<std::pair<double, int64_t>>& axes) {
  double sum = 0;
  double ranks_before = 1;
  double ranks_from_here = 1;
  for (const auto& [price, num_ranks] : axes) {
    ranks_from_here *= static_cast<double>(num_ranks);
  }
  for (const auto& [price, num_ranks] : axes) {
    const double others = static_cast<double>(num_ranks) - 1;
    ranks_before *= static_cast<double>(num_ranks);
    sum += price * others / (kind == StepKind::kAllToAll ? ranks_before : ranks_from_here);
    ranks_from_here /= static_cast<double>(num_ranks);
  }
  return kind == StepKind::kAllReduce ? 2 * sum : sum;
}

// Returns the costs of collectives on a ring with `hops` hops. An all_reduce goes around twice.
AxisCost ring_cost(double hops, double us_per_hop, double us_per_byte) {
  const LinkCost once{kBaseLatency + hops * us_per_hop, us_per_byte};
  return {once, once, {kBaseLatency + 2 * hops * us_per_hop, us_per_byte}, once, once};
}

AlphaBeta alpha_beta_of(const std::vector<RingAxis>& rings) {
  AlphaBeta model;
  for (const auto& ring : rings) {
    const double us_per_byte = 1e6 / (ring.gb_per_s * 1024 * 1024 * 1024);
    model.axes.push_back(ring_cost(ring.num_ranks - 1, ring.latency_us, us_per_byte));
  }
  return with_triangle_inequality(std::move(model));
}

}  // namespace

std::string_view to_string(StepKind kind) {
  constexpr std::array<std::string_view, 10> kNames{
      "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute",
      "split",      "to_partial",     "embed",      "apply_mask", "mask"};
  return kNames.at(static_cast<size_t>(kind));
}

bool communicates(StepKind kind) { return kind <= StepKind::kPermute; }

AlphaBeta default_alpha_beta(const Mesh& mesh) {
  constexpr double kLatencyPerHop = 0.6;
  constexpr double kUsPerByte = 1e6 / 87.7e9;
  AlphaBeta model;
  for (const int64_t size : mesh.sizes) {
    model.axes.push_back(ring_cost(static_cast<double>(size - 1), kLatencyPerHop, kUsPerByte));
  }
  model.copy = {2.0, 1e6 / 500e9};
  return with_triangle_inequality(std::move(model));
}

AlphaBeta with_triangle_inequality(AlphaBeta model) {
  for (auto& axis : model.axes) {
    const auto lower = [](LinkCost& link, const LinkCost& bound) {
      link.latency_us = std::min(link.latency_us, bound.latency_us);
      link.us_per_byte = std::min(link.us_per_byte, bound.us_per_byte);
    };
    lower(axis.all_to_all, axis.all_gather);
    lower(axis.permute, axis.all_gather);
    lower(axis.all_reduce, {axis.reduce_scatter.latency_us + axis.all_gather.latency_us,
                            (axis.reduce_scatter.us_per_byte + axis.all_gather.us_per_byte) / 2});
  }
  return model;
}

Costs::Costs(const CostModel& model, const Mesh& mesh) {
  if (std::holds_alternative<DTensorCosts>(model)) {
    auto rings = ring_axes(mesh);
    *this = Costs(alpha_beta_of(rings), mesh);
    rings_ = std::move(rings);
    return;
  }
  const auto* alpha_beta = std::get_if<AlphaBeta>(&model);
  if (alpha_beta != nullptr && static_cast<int64_t>(alpha_beta->axes.size()) != mesh.num_axes()) {
    throw std::invalid_argument("AlphaBeta: a cost model of " + std::to_string(alpha_beta->axes.size()) +
                                " axes for a mesh of " + std::to_string(mesh.num_axes()) +
                                " axes. Give one AxisCost for each axis of the mesh.");
  }
  const size_t num_sets = size_t{1} << mesh.sizes.size();
  links_.resize(num_sets);
  if (alpha_beta != nullptr) {
    copy_ = alpha_beta->copy;
    least_us_per_byte_ = std::numeric_limits<double>::infinity();
  }
  std::vector<std::pair<double, int64_t>> prices;  // of the axes of a set, slowest first
  prices.reserve(mesh.sizes.size());
  for (AxisSet axes = 1; axes < num_sets; ++axes) {
    for (size_t kind = 0; kind < links_[axes].size(); ++kind) {
      LinkCost& link = links_[axes].at(kind);
      prices.clear();
      for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
        if (!contains(axes, axis) || mesh.sizes[axis] == 1) {
          continue;
        }
        const LinkCost one = alpha_beta != nullptr ? alpha_beta->axes[axis].*kLinks.at(kind)
                                                   : LinkCost{kStepCounts.at(kind), 0};
        link.latency_us = std::max(link.latency_us, one.latency_us);
        const auto faster =
            std::ranges::find_if(prices, [&](const auto& price) { return price.first < one.us_per_byte; });
        prices.emplace(faster, one.us_per_byte, mesh.sizes[axis]);
        least_us_per_byte_ = std::min(least_us_per_byte_, one.us_per_byte);
      }
      link.us_per_byte = prices.empty() ? 0
                         : static_cast<StepKind>(kind) == StepKind::kPermute
                             ? prices.front().first
                             : staged_us_per_byte(static_cast<StepKind>(kind), prices);
    }
  }
  if (least_us_per_byte_ == std::numeric_limits<double>::infinity()) {
    least_us_per_byte_ = 0;
  }
}

double Costs::of(const StepSize& step) const {
  double cost = 0;
  if (step.bytes_copied > 0) {
    cost += copy_.latency_us + static_cast<double>(step.bytes_copied) * copy_.us_per_byte;
  }
  if (communicates(step.kind)) {
    const auto& link = links_[step.axes].at(static_cast<size_t>(step.kind));
    cost += link.latency_us + static_cast<double>(step.bytes_full) * link.us_per_byte;
  }
  return cost;
}

}  // namespace funcol
