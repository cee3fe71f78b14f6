// Operators that draw numbers: what a rank draws for its part is the caller's to see to.
#include "propagation/rules/dim_map.h"
#include "propagation/rules/families.h"
#include "propagation/rules/pointwise.h"

namespace funcol {
namespace {

// multinomial(self, num_samples): samples of each row's classes.
Rows multinomial(const OpCall& call) {
  RowList rows(call);
  const int64_t num_dims = call.tensor("self").num_dims();
  add_mapped_dims(rows, whole_dims(num_dims, {num_dims - 1}));
  return {.rows = rows.take(), .allows_empty_shards = false, .is_legal = nullptr};
}

}  // namespace

void add_random_rules(RuleTable& table) {
  table.add_all_overloads(
      {"aten::bernoulli", "aten::exponential", "aten::geometric", "aten::log_normal", "aten::native_dropout",
       "aten::normal", "aten::normal_functional", "aten::uniform"},
      pointwise());
  table.add_all_overloads({"aten::multinomial"}, multinomial);
}

}  // namespace funcol
