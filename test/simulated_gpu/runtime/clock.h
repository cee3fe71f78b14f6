// Vector clocks: which operations of which streams are known to come before something.
//
// Source: Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System"; Mattern, "Virtual Time
// and Global States of Distributed Systems".
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace simulated_gpu {

// For each stream, by its id, how many of its first operations come before.
class Clock {
 public:
  bool covers(uint64_t stream, uint64_t number) const {
    return stream < counts_.size() && counts_[stream] >= number;
  }

  bool covers(const Clock& other) const {
    for (size_t stream = 0; stream < other.counts_.size(); ++stream) {
      if (other.counts_[stream] > 0 && !covers(stream, other.counts_[stream])) {
        return false;
      }
    }
    return true;
  }

  void set(uint64_t stream, uint64_t count) {
    grow(stream + 1);
    counts_[stream] = std::max(counts_[stream], count);
  }

  void merge(const Clock& other) {
    grow(other.counts_.size());
    for (size_t i = 0; i < other.counts_.size(); ++i) {
      counts_[i] = std::max(counts_[i], other.counts_[i]);
    }
  }

 private:
  void grow(size_t size) {
    if (counts_.size() < size) {
      counts_.resize(size);
    }
  }

  std::vector<uint64_t> counts_;
};

}  // namespace simulated_gpu
