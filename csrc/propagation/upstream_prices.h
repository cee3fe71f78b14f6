// PyTorch's costs of redistributing one tensor to the layouts that the rows of a rule need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "planner/dtensor_costs.h"
#include "propagation/row_search.h"
#include "propagation/upstream_plans.h"
#include "propagation/upstream_search.h"

namespace funcol {

// Returns true if PyTorch considers both placements equal.
bool is_same_upstream(const Placement& a, const Placement& b);

// Returns true if the operand costs nothing in its own placements: in rows they have the default shard order.
bool is_free_unmoved(const UpstreamOperand& operand, bool strided_as_order);

// The costs of an operand in every layout that the rows make, and for each prefix, that is, rows of the first
// axes, the least cost of a layout that begins with it. All are priced at once; operands with more than
// kMostPriced layouts are priced one by one, and their prefixes cost 0 at least.
class UpstreamPrices {
 public:
  static constexpr size_t kMostPriced = size_t{1} << 17;

  // Prices `operand`. `placements[row]` is its placement in each row, whose strided shards mean an order if
  // `strided_as_order`. `rings` must outlive this.
  UpstreamPrices(const UpstreamOperand& operand, std::vector<Placement> placements, bool strided_as_order,
                 const std::vector<RingAxis>& rings);

  bool is_of(const UpstreamOperand& operand, const std::vector<Placement>& placements) const;

  // Returns a lower bound of the cost of a layout with these rows, or the cost itself if they cover all axes.
  double at_least(RowNumbers rows) const;

 private:
  void find_columns();
  void price_all();
  double price(const std::vector<Placement>& target) const;
  bool is_greedy_to(const std::vector<Placement>& placements) const;
  bool is_made_of_shards(const std::vector<Placement>& target) const;

  UpstreamOperand operand_;
  std::vector<Placement> placements_;
  bool strided_as_order_;
  const std::vector<RingAxis>& rings_;
  bool is_free_ = false;                          // no layout costs anything
  std::unique_ptr<UpstreamPlans> plans_;          // null if PyTorch plans greedily to all layouts
  std::vector<std::vector<Placement>> columns_;   // of each axis: placements with costs of their own
  std::vector<std::vector<uint32_t>> column_of_;  // [axis][row]
  std::vector<std::vector<double>> least_;        // [number of rows][prefix], the last axis fastest
};

}  // namespace funcol
