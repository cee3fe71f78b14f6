// Operators that draw random numbers. The caller gives each rank the random numbers of its shard.
#include "propagation/rules/dim_map.h"
#include "propagation/rules/families.h"
#include "propagation/rules/pointwise.h"

namespace funcol::random_rules {
namespace {

// multinomial(self, num_samples): samples of the classes, the last dim.
Rows multinomial(const OpCall& call) {
  RowList rows(call);
  add_mapped_dims(rows, whole_dims(num_dims(call), {num_dims(call) - 1}));
  return rows.refusing_empty_shards();
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators(
      {"aten::bernoulli", "aten::cauchy", "aten::exponential", "aten::geometric", "aten::log_normal",
       "aten::native_dropout", "aten::normal", "aten::normal_functional", "aten::random", "aten::uniform"},
      pointwise());
  table.add_operators({"aten::multinomial"}, multinomial);
}

}  // namespace funcol::random_rules
