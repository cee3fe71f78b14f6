// Removal of elements from a container under a lock, so that they are destroyed after its release.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <vector>

namespace funcol {

// Removes the items for which `predicate`, a function or a member, holds, and returns them. Both the removed
// and the remaining items keep their order.
template <typename Items, typename Predicate>
std::vector<typename Items::value_type> extract_if(Items& items, const Predicate& predicate) {
  const auto first = std::stable_partition(items.begin(), items.end(), std::not_fn(predicate));
  std::vector<typename Items::value_type> extracted(std::make_move_iterator(first),
                                                    std::make_move_iterator(items.end()));
  items.erase(first, items.end());
  return extracted;
}

}  // namespace funcol
