#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>

#include "async/async_tensor.h"
#include "comm/backend_call.h"
#include "comm/orphaned_works.h"
#include "comm/process_group.h"
#include "compat/missing_operators.h"
#include "ops/backend_tensor.h"
#include "ops/collectives.h"
#include "ops/meta.h"
#include "ops/operator.h"
#include "ops/schemas.h"

namespace funcol {
namespace {

void check_tag(int64_t tag, const char* op) {
  TORCH_CHECK_VALUE(tag >= 0 && tag <= std::numeric_limits<int>::max(), "funcol::", op, ": tag is ", tag,
                    ". Expected a number from 0 to ", std::numeric_limits<int>::max(), ".");
}

void check_peer(int64_t peer, const c10d::ProcessGroup& group, const char* what, const char* op) {
  check_rank(peer, group, what, op);
  TORCH_CHECK_VALUE(peer != group.getRank(), "funcol::", op, ": ", what, " is rank ", peer,
                    ", which is this rank itself. Pass another rank.");
}

void check_receive_buffer(const at::Tensor& tensor, const char* op) {
  TORCH_CHECK_VALUE(!tensor._is_zerotensor(), "funcol::", op,
                    ": the buffer is an efficient zero tensor, which has no memory. Receive into t.clone().");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "funcol::", op, ": the buffer of shape ", tensor.sizes(),
                    " has strides ", tensor.strides(), ". Receive into a contiguous tensor.");
}

c10::intrusive_ptr<c10d::Work> send(const at::Tensor& contiguous, int64_t peer, int64_t tag,
                                    c10d::ProcessGroup& group) {
  std::vector<at::Tensor> wires{wire_for_movement(contiguous, group)};
  return on_backend(group, contiguous.device().type(), [&](auto& target) {
    return target.send(wires, static_cast<int>(peer), static_cast<int>(tag));
  });
}

c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& contiguous, int64_t peer, int64_t tag,
                                       c10d::ProcessGroup& group) {
  std::vector<at::Tensor> wires{wire_for_movement(contiguous, group)};
  return on_backend(group, contiguous.device().type(), [&](auto& target) {
    return target.recv(wires, static_cast<int>(peer), static_cast<int>(tag));
  });
}

at::Tensor empty_like_sent(const at::Tensor& tensor) { return fresh_tensor({0}, tensor); }

// A Work that waits for several others, for backends that cannot coalesce. Each is waited for once, however
// many outputs share this Work: Gloo's receives never return from a second wait.
class CombinedWork final : public c10d::Work {
 public:
  explicit CombinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)), unwaited_(works_) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const std::scoped_lock lock(wait_mutex_);
    while (!unwaited_.empty()) {
      const auto work = unwaited_.back();
      unwaited_.pop_back();
      if (!work->wait(timeout)) {
        return false;
      }
    }
    return true;
  }
  bool isCompleted() override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<c10::intrusive_ptr<c10d::Work>> unwaited_;
  std::mutex wait_mutex_;
};

// Returns one Work for all `works`; null if there are none.
c10::intrusive_ptr<c10d::Work> combined(std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  if (works.empty()) {
    return {};
  }
  return c10::make_intrusive<CombinedWork>(std::move(works));
}

// Keeps the started operations of a batch alive if a later operation failed to start.
void leave_running(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> buffers,
                   at::TensorList tensors) {
  if (work) {
    buffers.insert(buffers.end(), tensors.begin(), tensors.end());
    adopt_orphan(std::move(work), std::move(buffers));
  }
}

}  // namespace

StartedCollective start_send(const at::Tensor& tensor, int64_t destination, int64_t tag,
                             const GroupPtr& group) {
  const BelowAutograd below_autograd;
  check_peer(destination, *group, "dst", "isend");
  check_tag(tag, "isend");
  check_dense(tensor, "isend");
  auto source = contiguous_input(tensor);
  auto work = send(source, destination, tag, *group);
  return {"isend", group, std::move(work), as_list(std::move(source)), {empty_like_sent(tensor)}, {}};
}

StartedCollective start_receive(const at::Tensor& tensor, int64_t source, int64_t tag,
                                const GroupPtr& group) {
  const BelowAutograd below_autograd;
  check_peer(source, *group, "src", "irecv");
  check_tag(tag, "irecv");
  check_dense(tensor, "irecv");
  settle(tensor);
  check_receive_buffer(tensor, "irecv");
  auto work = receive(tensor, source, tag, *group);
  return {"irecv", group, std::move(work), {}, {tensor}, {}};
}

StartedCollective start_batch_p2p(const std::vector<std::string>& kinds, at::IntArrayRef peers,
                                  at::IntArrayRef tags, at::TensorList tensors, const GroupPtr& group) {
  constexpr auto kOp = "batch_p2p_ops";
  const size_t count = kinds.size();
  TORCH_CHECK_VALUE(peers.size() == count && tags.size() == count && tensors.size() == count, "funcol::", kOp,
                    ": got ", count, " kinds, ", peers.size(), " peers, ", tags.size(), " tags and ",
                    tensors.size(), " tensors. Pass one of each per operation.");
  if (count == 0) {
    return {kOp, group, {}, {}, {}, {}};
  }
  const BelowAutograd below_autograd;
  check_dense(tensors, kOp);
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(kinds[i] == "isend" || kinds[i] == "irecv", "funcol::", kOp, ": operation ", i, " is '",
                      kinds[i], "'. Expected 'isend' or 'irecv'.");
    check_peer(peers[i], *group, "a peer", kOp);
    check_tag(tags[i], kOp);
    settle(tensors[i]);
    if (kinds[i] == "irecv") {
      check_receive_buffer(tensors[i], kOp);
    }
  }
  const auto device = tensors[0].device().type();
  const bool coalesces = std::ranges::any_of(
      tensors, [&](const at::Tensor& tensor) { return backend_coalesces(*group, tensor.device().type()); });
  std::vector<at::Tensor> buffers;
  std::vector<at::Tensor> outputs;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  if (coalesces) {
    check_one_device(tensors, kOp);  // the Work covers one backend
    group->startCoalescing(device);
  }
  try {
    for (size_t i = 0; i < count; ++i) {
      if (kinds[i] == "isend") {
        buffers.push_back(contiguous_input(tensors[i]));
        works.push_back(send(buffers.back(), peers[i], tags[i], *group));
        outputs.push_back(empty_like_sent(tensors[i]));
      } else {
        works.push_back(receive(tensors[i], peers[i], tags[i], *group));
        outputs.push_back(tensors[i]);
      }
    }
  } catch (...) {
    if (coalesces) {  // later collectives of the group must not become parts of this batch
      leave_running(group->endCoalescing(device), std::move(buffers), tensors);
    }
    throw;
  }
  auto work = coalesces ? group->endCoalescing(device) : combined(std::move(works));
  return {kOp, group, std::move(work), std::move(buffers), std::move(outputs), {}};
}

// Goes through the pairs in one order on all ranks, by the lower rank and then by the higher one; in each
// pair the lower rank sends first. A backend may block in an operation until the peer has reached it.
// Elements that a rank has for itself are copied.
StartedCollective start_exchange_in_pairs(const at::Tensor& input, at::IntArrayRef output_splits,
                                          at::IntArrayRef input_splits, const GroupPtr& group) {
  constexpr int64_t kTag = 7411;  // apart from sends of the program, which mostly have tag 0
  const BelowAutograd below_autograd;
  const auto source = contiguous_input(input);
  const auto received = fresh_tensor({c10::sum_integers(output_splits)}, source);
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<at::Tensor> buffers{source};
  const auto keep = [&](const at::Tensor& part) { return buffers.emplace_back(part); };
  try {
    int64_t sent_begin = 0;
    int64_t received_begin = 0;
    for (int64_t peer = 0; peer < group->getSize(); ++peer) {
      const bool is_self = group->getRank() == peer;
      if (is_self && input_splits[peer] > 0) {
        received.narrow(0, received_begin, output_splits[peer])
            .copy_(source.narrow(0, sent_begin, input_splits[peer]));
      }
      const auto send_part = [&] {
        if (input_splits[peer] > 0 && !is_self) {
          works.push_back(send(keep(source.narrow(0, sent_begin, input_splits[peer])), peer, kTag, *group));
        }
      };
      const bool is_lower = group->getRank() < peer;
      if (is_lower) {
        send_part();
      }
      if (output_splits[peer] > 0 && !is_self) {
        works.push_back(
            receive(keep(received.narrow(0, received_begin, output_splits[peer])), peer, kTag, *group));
      }
      if (!is_lower) {
        send_part();
      }
      sent_begin += input_splits[peer];
      received_begin += output_splits[peer];
    }
  } catch (...) {
    leave_running(combined(std::move(works)), std::move(buffers), {});
    throw;
  }
  return {"redistribute", group, combined(std::move(works)), std::move(buffers), {received}, {}};
}

namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor send_meta(const at::Tensor& tensor, int64_t, int64_t, std::string_view) {
  return meta_of_sizes(tensor, {c10::SymInt(0)});
}

at::Tensor receive_meta(const at::Tensor& tensor, int64_t, int64_t, std::string_view) {
  return at::empty_like(tensor);
}

// Returns the receive buffers themselves, as PyTorch's operator does, or new tensors, as funcol's does.
template <bool kReturnsBuffers>
Tensors batch_meta(const std::vector<std::string>& kinds, at::IntArrayRef, at::IntArrayRef,
                   at::TensorList tensors, std::string_view) {
  Tensors results;
  for (size_t i = 0; i < tensors.size(); ++i) {
    results.push_back(kinds.at(i) != "irecv" ? meta_of_sizes(tensors[i], {c10::SymInt(0)})
                      : kReturnsBuffers      ? tensors[i]
                                             : at::empty_like(tensors[i]));
  }
  return results;
}

Tensors as_received_batch(Arguments arguments, const char* op) {
  return as_received(from_stack(start_batch_p2p)(arguments, op), indices_of_receives(arguments[0]));
}

const auto kCoreSend = started(from_stack(start_send), as_registered);
const auto kCoreReceive = started(from_stack(start_receive), as_overwritten);
const auto kCoreBatch = started(from_stack(start_batch_p2p), as_overwritten);

template <typename Meta>
Operator point_to_point(const char* name, const StackFunction& run, const StackFunction& core_run,
                        Meta* meta) {
  return forwarded(
      {.name = name}, [&] { return boxed(name, run); }, torch::CppFunction(meta), core_run);
}

const auto kSendOperator =
    point_to_point("isend", started(from_stack(start_send), as_pending), kCoreSend, send_meta);
const auto kReceiveOperator =
    point_to_point("irecv",
                   started(from_stack(start_receive),
                           [](StartedCollective start) { return as_received(std::move(start), {0}); }),
                   kCoreReceive, receive_meta);
const auto kBatchOperator = point_to_point("batch_p2p_ops", as_received_batch, kCoreBatch, batch_meta<false>);

}  // namespace
}  // namespace funcol

TORCH_LIBRARY_FRAGMENT(_c10d_functional, m) {
  using namespace funcol;  // NOLINT(google-build-using-namespace)
  define_operators();
  compat::define_if_missing(
      m, "isend", [] { return boxed("isend", kCoreSend); }, send_meta);
  compat::define_if_missing(
      m, "irecv", [] { return boxed("irecv", kCoreReceive); }, receive_meta);
  compat::define_if_missing(
      m, "batch_p2p_ops", [] { return boxed("batch_p2p_ops", kCoreBatch); }, batch_meta<true>);
}
