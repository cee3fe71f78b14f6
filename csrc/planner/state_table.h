// A hash table that numbers states from 0 in the order of their insertion.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "planner/state.h"

namespace funcol {

// A hash table with open addressing over one array, so that a small search makes two allocations, not one for
// each state.
class StateTable {
 public:
  StateTable() : places_(kFirstPlaces, -1) { states_.reserve(kFirstPlaces / 2); }

  size_t size() const { return states_.size(); }
  // Returns the state of this number, valid until the next insert().
  const State& operator[](int number) const { return states_[number]; }

  // Returns the number of `state`, or -1 if it was not inserted.
  int find(const State& state) const { return places_[place_of(state)]; }

  // Inserts `state` if it is new. Returns its number, and whether it is new.
  std::pair<int, bool> insert(const State& state) {
    size_t place = place_of(state);
    if (places_[place] >= 0) {
      return {places_[place], false};
    }
    if (2 * (states_.size() + 1) > places_.size()) {
      grow();
      place = place_of(state);
    }
    places_[place] = static_cast<int>(states_.size());
    states_.push_back(state);
    return {places_[place], true};
  }

 private:
  static constexpr size_t kFirstPlaces = 128;  // the size is always a power of 2

  // Returns the index in places_ of `state`, or of the free place for it.
  size_t place_of(const State& state) const {
    const size_t mask = places_.size() - 1;
    size_t place = StateHash()(state) & mask;
    while (places_[place] >= 0 && states_[places_[place]] != state) {
      place = (place + 1) & mask;
    }
    return place;
  }

  void grow() {
    places_.assign(2 * places_.size(), -1);
    for (size_t number = 0; number < states_.size(); ++number) {
      places_[place_of(states_[number])] = static_cast<int>(number);
    }
  }

  std::vector<State> states_;
  std::vector<int> places_;  // hash -> number of a state; -1 for a free place
};

}  // namespace funcol
