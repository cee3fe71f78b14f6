// Operators that draw random numbers. The caller gives each rank the random numbers of its shard.
#include "propagation/rules/pointwise.h"
#include "propagation/rules/row_list.h"
#include "propagation/rules/rule_table.h"

namespace funcol::random_rules {
namespace {

// Returns no rows: the values decide how many numbers are drawn, so every rank draws for all elements.
Rows replicated(const OpCall& call) { return RowList(call).allowing_empty_shards(); }

}  // namespace

void add(RuleTable& table) {
  table.add_operators(
      {"aten::bernoulli", "aten::cauchy", "aten::exponential", "aten::geometric", "aten::log_normal",
       "aten::native_dropout", "aten::normal", "aten::normal_functional", "aten::random", "aten::uniform"},
      pointwise());
  table.add_operators({"aten::binomial", "aten::multinomial", "aten::poisson", "aten::_sample_dirichlet",
                       "aten::_standard_gamma"},
                      replicated);
}

}  // namespace funcol::random_rules
