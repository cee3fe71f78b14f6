#include "transfer/group_ranks.h"

#include <utility>

namespace funcol {

bool is_current(const GroupRef& group) {
  return group.end().value_or(GroupEnd::kDestroyed) == GroupEnd::kDestroyed;
}

void check_is_current(const GroupRef& group, const char* op) {
  TORCH_CHECK_VALUE(is_current(group), "funcol::", op, ": process group '", group.name(), "' ",
                    to_string(group.end().value_or(GroupEnd::kReconfigured)),
                    " after the DeviceMesh was made, and may have other ranks now. Make a new "
                    "mesh, and DTensors and FSDP2 modules on it; to_local() still gives what this rank has.");
}

GroupRanks::GroupRanks(const Mesh& mesh, AxisSet axes, Coordinate own, std::vector<int64_t> members)
    : mesh_(mesh), axes_(axes), own_(std::move(own)), rank_at_place_(mesh.num_ranks(axes)) {
  const int64_t num_ranks = mesh.num_ranks(axes);
  coordinates_.assign(num_ranks, own_);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    int64_t rest = members.empty() ? rank : members[rank];
    rank_at_place_[rest] = rank;
    for (int64_t axis = mesh.num_axes() - 1; axis >= 0; --axis) {
      if (contains(axes, axis)) {
        coordinates_[rank][axis] = rest % mesh.sizes[axis];
        rest /= mesh.sizes[axis];
      }
    }
  }
}

int64_t GroupRanks::rank_of(const Coordinate& coordinate) const {
  int64_t place = 0;
  for (int64_t axis = 0; axis < mesh_.num_axes(); ++axis) {
    if (contains(axes_, axis)) {
      place = place * mesh_.sizes[axis] + coordinate[axis];
    }
  }
  return rank_at_place_[place];
}

}  // namespace funcol
