// Plans that have been made before.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "planner/search.h"

namespace funcol {

// plan_redistribution(task, model, max_bytes), by default_alpha_beta() where there is no model; remembered by
// value. May be called by several threads at once.
std::shared_ptr<const Plan> cached_plan(const Redistribution& task, const std::optional<CostModel>& model,
                                        std::optional<int64_t> max_bytes);

// How many plans are remembered: at most 1024.
size_t num_cached_plans();
void forget_plans();

}  // namespace funcol
