#include "comm/agreement.h"

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "comm/gil_release.h"
#include "comm/process_group.h"

namespace funcol {
namespace {

std::atomic<int64_t> num_checking{0};

std::vector<int64_t> parse_ints(const std::string& numbers) {
  std::istringstream text(numbers);
  std::vector<int64_t> values;
  for (int64_t value = 0; text >> value;) {
    values.push_back(value);
  }
  return values;
}

// Returns the number of the group's next checked call: from 1, even at the address of a destroyed group.
int64_t next_number(c10d::ProcessGroup& group) {
  struct Count {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    int64_t number = 0;
  };
  static std::mutex mutex;
  static auto* const counts = new std::map<const void*, Count>;  // NOLINT: outlives the groups
  const std::scoped_lock lock(mutex);
  std::erase_if(*counts, [](const auto& entry) { return entry.second.group.expired(); });
  const auto found = counts->find(&group);
  if (found != counts->end()) {
    return ++found->second.number;
  }
  const auto held = GroupPtr::unsafe_reclaim_from_nonowning(&group);
  return counts->emplace(&group, Count{c10::weak_intrusive_ptr<c10d::ProcessGroup>(held), 1})
      .first->second.number;
}

// Returns how long the group waits for its ranks.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getDefaultBackend()->getBackendOptions()->timeout;
  } catch (const c10::Error&) {  // several backends, or one without options
    return group.getStore()->getTimeout();
  }
}

std::string key_of(int64_t number, int64_t rank) {
  return "funcol/agreement/" + std::to_string(number) + "/" + std::to_string(rank);
}

// Waits until all ranks have published under `keys`. `own` is what this rank has published.
void wait_for_records(c10d::ProcessGroup& group, int64_t number, const std::vector<std::string>& keys,
                      const std::string& own) {
  const auto store = group.getStore();
  const auto timeout = timeout_of(group);
  try {
    run_blocking([&] { store->wait(keys, timeout); });
  } catch (const std::exception& error) {
    std::vector<int64_t> absent;
    for (size_t rank = 0; rank < keys.size(); ++rank) {
      if (!store->check({keys[rank]})) {
        absent.push_back(static_cast<int64_t>(rank));
      }
    }
    TORCH_CHECK_WITH(
        DistBackendError, false, "funcol: rank ", group.getRank(), " of group '", group_name(group),
        "' calls ", own.substr(0, own.find('\n')), " as its call number ", number, ", but ranks ",
        at::IntArrayRef(absent), " called nothing within ", timeout.count(),
        " ms. All ranks have to make the same calls, inside check_agreement(). (", error.what(), ")");
  }
}

// Publishes `own` as this rank's record of a call; returns the records of all ranks.
std::vector<std::string> exchanged_records(c10d::ProcessGroup& group, int64_t number,
                                           const std::string& own) {
  const auto store = group.getStore();
  store->set(key_of(number, group.getRank()), std::vector<uint8_t>(own.begin(), own.end()));
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < group.getSize(); ++rank) {
    keys.push_back(key_of(number, rank));
  }
  wait_for_records(group, number, keys, own);
  std::vector<std::string> records;
  for (const auto& published : keys) {
    const auto bytes = store->get(published);
    records.emplace_back(bytes.begin(), bytes.end());
  }
  // All ranks have reached this number, so no rank reads the records of the previous number any more.
  store->deleteKey(key_of(number - 1, group.getRank()));
  return records;
}

// Publishes `record`, whose first line is the call; returns the records of all ranks, whose first lines
// agree.
std::vector<std::string> records_of_equal_calls(c10d::ProcessGroup& group, const std::string& record) {
  const auto number = next_number(group);
  auto records = exchanged_records(group, number, record);
  const auto call_of = [&](size_t rank) { return records[rank].substr(0, records[rank].find('\n')); };
  for (size_t rank = 1; rank < records.size(); ++rank) {
    TORCH_CHECK_WITH(DistBackendError, call_of(rank) == call_of(0), "funcol: the ranks of group '",
                     group_name(group), "' disagree on call number ", number, ". Rank 0 calls ", call_of(0),
                     "; rank ", rank, " calls ", call_of(rank),
                     ". Nothing was sent. All ranks have to make the same calls in the same order.");
  }
  return records;
}

bool can_exchange_records(const c10d::ProcessGroup& group) {
  return group.getSize() > 1 && group.getStore() && group.getBackendName() != "fake";
}

std::string describe_call(const char* op, const std::string& arguments, const std::string& tensors) {
  return std::string(op) + "(" + arguments + ") with " + tensors;
}

}  // namespace

void check_agreement(bool begin) { num_checking.fetch_add(begin ? 1 : -1, std::memory_order_relaxed); }

bool agreement_is_checked() { return num_checking.load(std::memory_order_relaxed) > 0; }

std::string describe_tensors(const ComparedTensors& compared) {
  const auto& [tensors, free_dim] = compared;
  std::ostringstream text;
  for (size_t i = 0; i < tensors.size(); ++i) {
    text << (i == 0 ? "" : ", ") << tensors[i].scalar_type() << " [";
    for (int64_t dim = 0; dim < tensors[i].dim(); ++dim) {
      text << (dim == 0 ? "" : ", ");
      if (dim == free_dim) {
        text << "any";
      } else {
        text << tensors[i].size(dim);
      }
    }
    text << "] on " << tensors[i].device().type();
  }
  return tensors.empty() ? "no tensors" : text.str();
}

void agree(c10d::ProcessGroup& group, const char* op, const std::string& arguments,
           const std::string& tensors) {
  if (can_exchange_records(group)) {
    records_of_equal_calls(group, describe_call(op, arguments, tensors));
  }
}

void agree_on_exchange_if_checked(c10d::ProcessGroup& group, const char* op, const at::Tensor& rows,
                                  at::IntArrayRef output_splits, at::IntArrayRef input_splits) {
  if (!agreement_is_checked() || !can_exchange_records(group)) {
    return;
  }
  const auto tensors = describe_tensors({rows, /*free_dim=*/0});
  std::vector<std::vector<int64_t>> sent;
  std::vector<std::vector<int64_t>> expected;
  for (const auto& record :
       records_of_equal_calls(group, describe_call(op, "", tensors) + "\n" + c10::Join(" ", input_splits) +
                                         "\n" + c10::Join(" ", output_splits))) {
    const auto first = record.find('\n');
    const auto second = record.find('\n', first + 1);
    sent.push_back(parse_ints(record.substr(first + 1, second - first - 1)));
    expected.push_back(parse_ints(record.substr(second + 1)));
  }
  for (size_t from = 0; from < sent.size(); ++from) {
    for (size_t to = 0; to < sent.size(); ++to) {
      TORCH_CHECK_WITH(DistBackendError, sent[from].at(to) == expected[to].at(from), "funcol::", op,
                       ": the ranks of group '", group_name(group), "' disagree: rank ", from, " sends ",
                       sent[from][to], " rows to rank ", to, " (its input_split_sizes are ",
                       at::IntArrayRef(sent[from]), "), which expects ", expected[to][from],
                       " (its output_split_sizes are ", at::IntArrayRef(expected[to]),
                       "). Nothing was sent.");
    }
  }
}

}  // namespace funcol
