// Moves between meshes: each plan gives the right numbers on simulated ranks, each rank receives what it
// lacks once, and the plan keeps to its bound on memory.
#include <algorithm>
#include <map>
#include <numeric>

#include "bytes.h"
#include "failure.h"
#include "fuzz_target.h"
#include "plan_choices.h"
#include "plan_run.h"
#include "planner/legal.h"
#include "planner/mesh_change.h"
#include "planner/mesh_changes.h"

namespace funcol::test {
namespace {

constexpr int64_t kMostRanks = 8;  // of a mesh

// A mesh of as many ranks: axes are split into their prime factors, and neighbours are merged.
Mesh view_of(Bytes& bytes, const Mesh& mesh) {
  Mesh view;
  for (const int64_t size : mesh.sizes) {
    int64_t rest = size;
    for (int64_t factor = 2; rest > 1; ++factor) {
      for (; rest % factor == 0; rest /= factor) {
        if (view.sizes.empty() || bytes.coin()) {
          view.sizes.push_back(1);
        }
        view.sizes.back() *= factor;
      }
    }
  }
  if (view.sizes.empty()) {
    view.sizes.push_back(1);
  }
  for (AxisSet axes = 1; axes < AxisSet{1} << view.num_axes(); ++axes) {
    if (num_axes(axes) > 1 && bytes.coin()) {
      view.merged.push_back(axes);
    }
  }
  return view;
}

// Ranks of a world of half as many again as a mesh has at most: in order, or shuffled.
RankedMesh ranks_from(Bytes& bytes, Mesh mesh) {
  std::vector<int64_t> ranks(kMostRanks + kMostRanks / 2);
  std::iota(ranks.begin(), ranks.end(), 0);
  if (bytes.coin()) {
    bytes.shuffle(ranks);
  }
  const auto first = bytes.below(static_cast<int64_t>(ranks.size()) - mesh.num_ranks() + 1);
  const auto begin = ranks.begin() + first;
  std::vector<int64_t> chosen(begin, begin + mesh.num_ranks());
  return {std::move(mesh), std::move(chosen)};
}

struct Case {
  MeshChangeTask task;
  MeshChangeCosts costs;
};

Case case_from(Bytes& bytes) {
  const int64_t num_dims = bytes.below(4);
  Case made;
  auto& task = made.task;
  task.shape = shape_from(bytes, num_dims, 64);
  task.itemsize = bytes.one_of<int64_t>({4, 1, 1 << 16});
  task.src_mesh = ranks_from(bytes, mesh_from(bytes, 3, kMostRanks));
  if (bytes.coin()) {
    task.dst_mesh = {view_of(bytes, task.src_mesh.mesh), task.src_mesh.ranks};
  } else {
    task.dst_mesh = ranks_from(bytes, mesh_from(bytes, 3, kMostRanks));
  }
  const auto op = reduction_from(bytes);
  const bool strided = bytes.coin();
  task.src = layout_from(bytes, task.src_mesh.mesh, num_dims, {op, strided, false});
  task.dst = layout_from(bytes, task.dst_mesh.mesh, num_dims, {op, strided, false});
  made.costs = {model_from(bytes, task.src_mesh.mesh), model_from(bytes, task.dst_mesh.mesh)};
  if (made.costs.src.index() != made.costs.dst.index()) {  // models are of one kind
    made.costs = {default_alpha_beta(task.src_mesh.mesh), default_alpha_beta(task.dst_mesh.mesh)};
  }
  return made;
}

// The numbers that the ranks of a mesh hold, by rank and element of the whole tensor.
using Held = std::map<int64_t, std::map<int64_t, double>>;

Held held_by(const RankedMesh& mesh, const Layout& layout, const std::vector<int64_t>& shape,
             const RankTensors& tensors) {
  Held held;
  const auto places = coordinates(mesh.mesh);
  for (size_t place = 0; place < places.size(); ++place) {
    const auto indices = elements(layout, mesh.mesh, shape, places[place]);
    for (size_t i = 0; i < indices.size(); ++i) {
      held[mesh.ranks[place]][indices[i]] = tensors[place].values.at(i);
    }
  }
  return held;
}

// Sends the messages of a transfer. Fails if one has what its sender lacks, or what its receiver has.
RankTensors transferred(const Transfer& transfer, const RankTensors& tensors) {
  const auto& task = transfer.task;
  const auto objects = [&](const std::string& what) {
    fail(what + "; " + to_string(transfer) + described(task));
  };
  const Held before = held_by(task.src_mesh, task.src, task.shape, tensors);
  Held after = before;
  const auto messages = all_messages(task);
  for (const auto& message : messages.sent) {
    const auto sender = before.find(message.sender);
    for (const int64_t element : elements_of(message, task.shape)) {
      if (sender == before.end() || !sender->second.contains(element)) {
        objects("rank " + std::to_string(message.sender) + " sends what it lacks");
      }
      if (!after[message.receiver].emplace(element, sender->second.at(element)).second) {
        objects("rank " + std::to_string(message.receiver) + " receives what it has");
      }
    }
  }
  for (const int64_t rank : all_ranks(task)) {
    TransferMessages of_rank = messages;
    std::erase_if(of_rank.sent, [&](const auto& one) { return one.sender != rank && one.receiver != rank; });
    std::erase_if(of_rank.kept, [&](const auto& one) { return one.sender != rank; });
    if (messages_of(task, rank) != of_rank) {
      objects("rank " + std::to_string(rank) + " plans other messages than the others for it");
    }
  }
  RankTensors received;
  const auto places = coordinates(task.dst_mesh.mesh);
  for (size_t place = 0; place < places.size(); ++place) {
    const int64_t rank = task.dst_mesh.ranks[place];
    Numbers local{local_shape(task.dst, task.dst_mesh.mesh, task.shape, places[place]), {}};
    for (const int64_t element : elements(task.dst, task.dst_mesh.mesh, task.shape, places[place])) {
      if (!after[rank].contains(element)) {
        objects("rank " + std::to_string(rank) + " never gets element " + std::to_string(element));
      }
      local.values.push_back(after[rank][element]);
    }
    received.push_back(std::move(local));
  }
  return received;
}

RankTensors run_plan(const Plan& plan, RankTensors tensors, const MeshChangeTask& task) {
  if (const auto objection = objection_to(plan); !objection.empty()) {
    fail(to_string(plan) + ": " + objection + "; " + described(task));
  }
  return PlanRun(plan, std::move(tensors)).run();
}

// Runs all parts of a plan, and compares with the whole tensor.
void check(const MeshChange& change) {
  const auto& task = change.task;
  const Numbers whole = whole_numbers(task.shape);
  auto tensors = distributed(whole, task.src, task.src_mesh.mesh, 1);
  if (change.before.has_value()) {
    tensors = run_plan(*change.before, std::move(tensors), task);
  }
  if (change.transfer.has_value()) {
    tensors = transferred(*change.transfer, tensors);
  }
  if (change.after.has_value()) {
    tensors = run_plan(*change.after, std::move(tensors), task);
  }
  if (const auto wrong = difference(tensors, whole, task.dst, task.dst_mesh.mesh); !wrong.empty()) {
    fail(to_string(change) + ": " + wrong + "; " + described(task));
  }
}

// A transfer that is all of a plan has the least busiest sender.
void check_senders(const MeshChange& change) {
  if (!change.transfer.has_value() || change.before.has_value() || change.after.has_value()) {
    return;
  }
  int64_t busiest = 0;
  for (const auto& row : bytes_matrix(change)) {
    busiest = std::max(busiest, std::accumulate(row.begin(), row.end(), int64_t{0}));
  }
  if (busiest != least_busiest_bytes(change.task)) {
    fail("the busiest rank sends " + std::to_string(busiest) + " bytes; " + to_string(*change.transfer) +
         described(change.task));
  }
}

// The bytes that the refusal names; -1 if the bound is not refused.
int64_t least_bytes(const Case& made, int64_t max_bytes) {
  return number_in_refusal([&] { plan_mesh_change(made.task, made.costs, max_bytes); },
                           "The least that a plan takes is ([0-9]+)\\.$");
}

void check_bounds(Bytes& bytes, const Case& made, const MeshChange& free) {
  const int64_t least = least_bytes(made, -1);
  const int64_t bound = least + (std::max(free.peak_bytes, least) - least) * bytes.below(5) / 4;
  const auto change = plan_mesh_change(made.task, made.costs, bound);
  check(change);
  if (change.peak_bytes > bound) {
    fail("a plan holds more than " + std::to_string(bound) + " bytes; " + described(made.task));
  }
  if (least > 0 && least_bytes(made, least - 1) != least) {
    fail("a byte less than the least bound, " + std::to_string(least) + ", is not refused with it; " +
         described(made.task));
  }
}

}  // namespace

void run(Bytes& bytes) {
  const Case made = case_from(bytes);
  const bool bounded = bytes.below(4) == 1;
  const auto change = plan_mesh_change(made.task, made.costs);
  check(change);
  check_senders(change);
  if (bounded) {
    check_bounds(bytes, made, change);
  }
}

}  // namespace funcol::test
