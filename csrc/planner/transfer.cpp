#include "planner/transfer.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "planner/transfer_side.h"

namespace funcol {
namespace {

// The number of elements of each source block that the target ranks below `rank` want, held or not.
//
// The wanted part of a block is a product over dims. Dims that one side alone cuts are factors of one side,
// so the ranks are first summed by their cuts of the other dims, the mixed ones.
class WantedBefore {
 public:
  WantedBefore(const TransferSide& src, const TransferSide& dst, int64_t rank) : src_(src), dst_(dst) {
    int64_t num_keys = 1;
    int64_t num_sums = 1;
    for (size_t dim = 0; dim < src.num_dims(); ++dim) {
      if (is_mixed(dim)) {
        num_keys *= dst.num_cuts(dim);
        num_sums *= src.num_cuts(dim);
      }
    }
    weights_.resize(num_keys);
    sums_.resize(num_sums, -1);
    for (const auto& one : dst.ranks()) {
      if (one.rank >= rank) {
        break;
      }
      add(dst.cuts_of(one.block));
    }
  }

  int64_t of(int64_t src_block) {
    const auto cuts = src_.cuts_of(src_block);
    int64_t factor = 1;
    int64_t number = 0;
    for (size_t dim = 0; dim < cuts.size(); ++dim) {
      if (is_mixed(dim)) {
        number = number * src_.num_cuts(dim) + cuts[dim];
      } else if (src_.num_cuts(dim) > 1) {
        factor *= num_indices(src_.indices(dim, cuts[dim]));
      }
    }
    if (sums_[number] < 0) {
      std::vector<std::vector<CutShare>> shares;
      for (size_t dim = 0; dim < cuts.size(); ++dim) {
        if (is_mixed(dim)) {
          shares.push_back(shares_of(src_.indices(dim, cuts[dim]), dst_, dim));
        }
      }
      sums_[number] = sum(shares, 0, 0);
    }
    return factor * sums_[number];
  }

 private:
  bool is_mixed(size_t dim) const { return src_.num_cuts(dim) > 1 && dst_.num_cuts(dim) > 1; }

  void add(const std::vector<int64_t>& cuts) {
    int64_t key = 0;
    int64_t weight = 1;
    for (size_t dim = 0; dim < cuts.size(); ++dim) {
      if (is_mixed(dim)) {
        key = key * dst_.num_cuts(dim) + cuts[dim];
      } else if (src_.num_cuts(dim) == 1) {
        weight *= num_indices(dst_.indices(dim, cuts[dim]));
      }
    }
    weights_[key] += weight;
  }

  int64_t sum(const std::vector<std::vector<CutShare>>& shares, size_t i, int64_t key) const {
    if (i == shares.size()) {
      return weights_[key];
    }
    int64_t total = 0;
    for (const auto& share : shares[i]) {
      total += share.size * sum(shares, i + 1, key * num_keys_of(i) + share.cut);
    }
    return total;
  }

  // Returns the number of cuts of the `i`-th mixed dim in the target.
  int64_t num_keys_of(size_t i) const {
    for (size_t dim = 0;; ++dim) {
      if (is_mixed(dim) && i-- == 0) {
        return dst_.num_cuts(dim);
      }
    }
  }

  const TransferSide& src_;
  const TransferSide& dst_;
  std::vector<int64_t> weights_;  // by cuts of the mixed dims in the target
  std::vector<int64_t> sums_;     // by cuts of the mixed dims in the source; -1 where not known yet
};

// The division of a transfer among senders. Each rank that holds a block sends one stretch of its requested
// elements, which are ordered by receiver. The stretch begins where that of the previous holder ends, so it
// has few receivers, and low-numbered ones for low-numbered holders.
class SenderShares {
 public:
  explicit SenderShares(const MeshChangeTask& task)
      : task_(task),
        src_("the source", task.src_mesh, task.src, task.shape),
        dst_("the target", task.dst_mesh, task.dst, task.shape) {}

  TransferLoads loads() const {
    TransferLoads loads;
    std::vector<int64_t> requested(src_.num_blocks());
    for (int64_t block = 0; block < src_.num_blocks(); ++block) {
      requested[block] = requested_of(block);
      loads.total += requested[block];
      loads.bound = std::max(loads.bound, (requested[block] + src_.num_holders() - 1) / src_.num_holders());
    }
    std::vector<int64_t> num_placed(src_.num_blocks());  // by block, the holders seen so far
    auto dst = dst_.ranks().begin();
    const auto add_receivers_below = [&](int64_t rank) {
      for (; dst != dst_.ranks().end() && dst->rank < rank; ++dst) {
        add(loads, 0, 0, dst_.numel(dst->block), dst_.numel(dst->block));
      }
    };
    for (const auto& [rank, block] : src_.ranks()) {
      add_receivers_below(rank);
      const int64_t place = num_placed[block]++;
      const int64_t sent = end_of(requested[block], place) - end_of(requested[block], place - 1);
      const bool receives = dst != dst_.ranks().end() && dst->rank == rank;
      const int64_t after = receives ? dst_.numel(dst->block) : 0;
      add(loads, src_.numel(block), sent, receives ? after - num_common(src_, block, dst_, dst->block) : 0,
          after);
      dst += receives ? 1 : 0;
    }
    add_receivers_below(std::numeric_limits<int64_t>::max());
    for (int64_t TransferLoads::*bytes :
         {&TransferLoads::total, &TransferLoads::busiest_sender, &TransferLoads::busiest_receiver,
          &TransferLoads::busiest_copier, &TransferLoads::peak, &TransferLoads::bound}) {
      loads.*bytes *= task_.itemsize;
    }
    return loads;
  }

  TransferMessages of_rank(int64_t rank) const {
    TransferMessages messages;
    if (const auto* holder = src_.find(rank)) {
      const auto place = std::ranges::find(src_.holders(holder->block), rank);
      send(holder->block, place - src_.holders(holder->block).begin(), requests_of(holder->block),
           messages.sent);
    }
    receive(rank, messages.sent);
    keep(rank, messages.kept);
    sort(messages.sent);
    return messages;
  }

  TransferMessages of_all() const {
    TransferMessages messages;
    for (int64_t block = 0; block < src_.num_blocks(); ++block) {
      const auto requests = requests_of(block);
      for (int64_t place = 0; place < src_.num_holders(); ++place) {
        send(block, place, requests, messages.sent);
      }
    }
    for (const auto& one : src_.ranks()) {
      keep(one.rank, messages.kept);
    }
    sort(messages.sent);
    return messages;
  }

 private:
  // The elements of a block that one rank requests, and where they begin after those of lower ranks.
  struct Request {
    int64_t receiver;
    int64_t block;
    int64_t size;
    int64_t begin = 0;

    int64_t end() const { return begin + size; }
  };

  static void sort(std::vector<TransferMessage>& messages) {
    std::ranges::sort(messages, {}, [](const TransferMessage& message) {
      return std::tuple(message.sender, message.receiver);
    });
  }

  static void add(TransferLoads& loads, int64_t before, int64_t sent, int64_t received, int64_t after) {
    loads.busiest_sender = std::max(loads.busiest_sender, sent);
    loads.busiest_receiver = std::max(loads.busiest_receiver, received);
    loads.busiest_copier = std::max(loads.busiest_copier, sent + after);
    loads.peak = std::max(loads.peak, before + sent + received + after);
  }

  // Returns the number of elements of a block that `holder` itself wants.
  int64_t kept_by(int64_t holder, int64_t block) const {
    const auto* wants = dst_.find(holder);
    return wants != nullptr ? num_common(src_, block, dst_, wants->block) : 0;
  }

  // Returns the number of elements of a block that other ranks want. Every block of the target goes to
  // equally many ranks.
  int64_t requested_of(int64_t block) const {
    int64_t requested = src_.numel(block) * dst_.num_holders();
    for (const int64_t holder : src_.holders(block)) {
      requested -= kept_by(holder, block);
    }
    return requested;
  }

  // Returns the end of the stretch that the holder at `place` sends of the `requested` elements of a block.
  int64_t end_of(int64_t requested, int64_t place) const {
    const int64_t num = src_.num_holders();
    // Not requested * (place + 1) / num, which may overflow.
    return requested / num * (place + 1) + requested % num * (place + 1) / num;
  }

  std::vector<Request> requests_of(int64_t block) const {
    std::vector<Request> requests;
    const auto holders = src_.holders(block);
    for_each_common_block(src_, block, dst_, [&](int64_t wanted, int64_t size) {
      for (const int64_t receiver : dst_.holders(wanted)) {
        if (!std::ranges::binary_search(holders, receiver)) {
          requests.push_back({receiver, wanted, size});
        }
      }
    });
    std::ranges::sort(requests, {}, &Request::receiver);
    for (size_t i = 1; i < requests.size(); ++i) {
      requests[i].begin = requests[i - 1].end();
    }
    return requests;
  }

  void send(int64_t block, int64_t place, const std::vector<Request>& requests,
            std::vector<TransferMessage>& messages) const {
    const int64_t requested = requests.empty() ? 0 : requests.back().end();
    const int64_t begin = end_of(requested, place - 1);
    const int64_t end = end_of(requested, place);
    for (auto request = std::ranges::upper_bound(requests, begin, {}, &Request::end);
         begin < end && request != requests.end() && request->begin < end; ++request) {
      const int64_t from = std::max(begin, request->begin);
      messages.push_back({src_.holders(block)[place], request->receiver, box(block, request->block),
                          from - request->begin, std::min(end, request->end()) - from});
    }
  }

  void receive(int64_t rank, std::vector<TransferMessage>& messages) const {
    const auto* receiver = dst_.find(rank);
    if (receiver == nullptr) {
      return;
    }
    std::optional<WantedBefore> wanted;  // where holders share
    if (src_.num_holders() > 1) {
      wanted.emplace(src_, dst_, rank);
    }
    for_each_common_block(dst_, receiver->block, src_, [&](int64_t block, int64_t size) {
      const auto holders = src_.holders(block);
      if (std::ranges::binary_search(holders, rank)) {
        return;
      }
      const int64_t requested = wanted.has_value() ? requested_of(block) : size;
      int64_t first = wanted.has_value() ? wanted->of(block) : 0;  // of `requested`, that this rank gets
      for (const int64_t holder : holders) {
        first -= holder < rank ? kept_by(holder, block) : 0;
      }
      const auto ends_before = [&](int64_t place) { return end_of(requested, place) <= first; };
      for (int64_t place = first_place(ends_before), begin = 0; begin < size; ++place) {
        const int64_t end = std::min(size, end_of(requested, place) - first);
        if (begin < end) {
          messages.push_back({holders[place], rank, box(block, receiver->block), begin, end - begin});
        }
        begin = end;
      }
    });
  }

  // Returns the first place of a holder for which `is_before` is false.
  template <typename IsBefore>
  int64_t first_place(const IsBefore& is_before) const {
    int64_t low = 0;
    for (int64_t high = src_.num_holders() - 1; low < high;) {
      const int64_t middle = low + (high - low) / 2;
      if (is_before(middle)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  void keep(int64_t rank, std::vector<TransferMessage>& kept) const {
    const auto* holder = src_.find(rank);
    const auto* receiver = dst_.find(rank);
    if (holder == nullptr || receiver == nullptr) {
      return;
    }
    if (const int64_t size = num_common(src_, holder->block, dst_, receiver->block); size > 0) {
      kept.push_back({rank, rank, box(holder->block, receiver->block), 0, size});
    }
  }

  // Returns the indices that a block of the source and a block of the target have in common.
  std::vector<Intervals> box(int64_t src_block, int64_t dst_block) const {
    const auto src_cuts = src_.cuts_of(src_block);
    const auto dst_cuts = dst_.cuts_of(dst_block);
    std::vector<Intervals> indices(src_.num_dims());
    for (size_t dim = 0; dim < indices.size(); ++dim) {
      indices[dim] = common_indices(src_.indices(dim, src_cuts[dim]), dst_.indices(dim, dst_cuts[dim]));
    }
    return indices;
  }

  const MeshChangeTask& task_;
  TransferSide src_;
  TransferSide dst_;
};

}  // namespace

Transfer plan_transfer(MeshChangeTask task) {
  const auto loads = SenderShares(task).loads();
  return {std::move(task), loads};
}

TransferMessages messages_of(const MeshChangeTask& task, int64_t rank) {
  return SenderShares(task).of_rank(rank);
}

TransferMessages all_messages(const MeshChangeTask& task) { return SenderShares(task).of_all(); }

std::optional<std::vector<Intervals>> indices_at(const RankedMesh& mesh, const Layout& layout,
                                                 const std::vector<int64_t>& shape, int64_t rank) {
  const auto found = std::ranges::find(mesh.ranks, rank);
  if (found == mesh.ranks.end()) {
    return std::nullopt;
  }
  return local_indices(layout, mesh.mesh, shape, mesh.mesh.coordinate(found - mesh.ranks.begin()));
}

std::vector<int64_t> all_ranks(const MeshChangeTask& task) {
  auto ranks = task.src_mesh.ranks;
  ranks.insert(ranks.end(), task.dst_mesh.ranks.begin(), task.dst_mesh.ranks.end());
  std::ranges::sort(ranks);
  // NOLINTNEXTLINE(modernize-use-ranges): clang 14 does not compile std::ranges::unique
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::vector<std::vector<int64_t>> bytes_matrix(const Transfer& transfer) {
  const auto ranks = all_ranks(transfer.task);
  const auto place_of = [&](int64_t rank) { return std::ranges::lower_bound(ranks, rank) - ranks.begin(); };
  std::vector<std::vector<int64_t>> bytes(ranks.size(), std::vector<int64_t>(ranks.size()));
  for (const auto& message : all_messages(transfer.task).sent) {
    bytes[place_of(message.sender)][place_of(message.receiver)] = message.size * transfer.task.itemsize;
  }
  return bytes;
}

std::string to_string(const Transfer& transfer) {
  std::string text;
  for (const auto& message : all_messages(transfer.task).sent) {
    text += std::to_string(message.sender) + " -> " + std::to_string(message.receiver) + ": " +
            std::to_string(message.size * transfer.task.itemsize) + " B of [";
    int64_t numel = 1;
    for (size_t dim = 0; dim < message.indices.size(); ++dim) {
      text += dim == 0 ? "" : ", ";
      numel *= num_indices(message.indices[dim]);
      for (size_t i = 0; i < message.indices[dim].size(); ++i) {
        const auto& interval = message.indices[dim][i];
        text += (i == 0 ? "" : "+") + std::to_string(interval.begin) + ":" + std::to_string(interval.end());
      }
    }
    text += ']';
    if (message.size != numel) {
      text += ", from element " + std::to_string(message.begin);
    }
    text += '\n';
  }
  return text;
}

}  // namespace funcol
