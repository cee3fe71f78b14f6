// Rows from text, beside calls of operators.
#pragma once

#include <string>
#include <vector>

#include "propagation/rule.h"
#include "propagation/rules/calls.h"

namespace funcol::test {

// "S0 <- S0,R"; S0* is any_shard(0), M a partial sum with a new mask.
inline Row row(const std::string& text) {
  const auto placements = [](const std::string& side) {
    std::vector<size_t> any;
    std::vector<size_t> masked;
    size_t number = 0;
    std::string plain;
    for (const char letter : side) {
      if (letter == '*') {
        any.push_back(number);
        continue;
      }
      if (letter == 'M') {
        masked.push_back(number);
      }
      number += letter == ',' ? 1 : 0;
      plain += letter == 'M' ? 'P' : letter;
    }
    auto result = parse_placements(plain);
    for (const size_t i : any) {
      result[i].split_factor = kAnySplit;
    }
    for (const size_t i : masked) {
      result[i].mask = new_mask(0);
    }
    return result;
  };
  const auto arrow = text.find(" <- ");
  Row row;
  for (const auto& placement : placements(text.substr(0, arrow))) {
    row.outputs.emplace_back(placement);
  }
  row.inputs = placements(text.substr(arrow + 4));
  return row;
}

inline Rows rows_from_texts(const std::vector<std::string>& texts, bool allows_empty_shards = false) {
  Rows rows;
  for (const auto& text : texts) {
    rows.rows.push_back(row(text));
  }
  rows.allows_empty_shards = allows_empty_shards;
  return rows;
}

}  // namespace funcol::test
