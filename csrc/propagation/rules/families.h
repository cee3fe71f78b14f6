// The table of rules that find_rule() reads, and the functions that fill it, a function for each family.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "propagation/rule.h"

namespace funcol {

// Finds names without copying them.
struct NameHash {
  using is_transparent = void;
  size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
};
template <typename T>
using ByName = std::unordered_map<std::string, T, NameHash, std::equal_to<>>;

// Rules by names: "aten::add.Tensor" is the overload Tensor of the operator "aten::add".
class RuleTable {
 public:
  // Adds a rule of all overloads of these operators, and of their in-place, out= and _foreach_ forms.
  void add_operators(std::initializer_list<std::string_view> operators, const Rule& rule);
  // Adds a rule of these overloads alone.
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
