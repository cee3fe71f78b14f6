// The families of operators that have rules: each adds its own to the table that find_rule() reads.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "propagation/rule.h"

namespace funcol {

// Names are found without copying them.
struct NameHash {
  using is_transparent = void;
  size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
};
template <typename T>
using ByName = std::unordered_map<std::string, T, NameHash, std::equal_to<>>;

// What operators are called in here: "aten::add.Tensor" is the overload Tensor of the operator "aten::add".
class RuleTable {
 public:
  // For every overload of the operators, in-place and out= forms too, and what _foreach_ makes of them.
  void add_all_overloads(std::initializer_list<std::string_view> operators, const Rule& rule);
  // For these overloads alone, written out.
  void add_overloads(std::initializer_list<std::string_view> overloads, const Rule& rule);

  const Rule* find(std::string_view op) const;
  std::vector<std::string> names() const;

 private:
  ByName<Rule> overloads_;
  ByName<Rule> operators_;
};

void add_pointwise_rules(RuleTable& table);
void add_copy_rules(RuleTable& table);
void add_optimizer_rules(RuleTable& table);
void add_matrix_rules(RuleTable& table);
void add_reshape_rules(RuleTable& table);
void add_view_rules(RuleTable& table);
void add_reduction_rules(RuleTable& table);
void add_scan_rules(RuleTable& table);
void add_loss_rules(RuleTable& table);
void add_embedding_rules(RuleTable& table);
void add_indexing_rules(RuleTable& table);
void add_joining_rules(RuleTable& table);
void add_attention_rules(RuleTable& table);
void add_convolution_rules(RuleTable& table);
void add_pooling_rules(RuleTable& table);
void add_linear_algebra_rules(RuleTable& table);
void add_random_rules(RuleTable& table);
void add_normalization_rules(RuleTable& table);

}  // namespace funcol
